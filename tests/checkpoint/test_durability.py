"""Crashes, signals and full disks: no saved state is lost, and no leftover file causes harm."""

import os
import pty
import random
import shutil
import signal
import subprocess
import time
from functools import cache

import numpy as np
import pytest
from commands import SMALL, complete, losses, start, train_command

from jaxpipe import train

pytestmark = pytest.mark.usefixtures("hangup_stops")

KILLS = int(os.environ.get("JAXPIPE_KILLS", "3"))  # more for a longer trial
ONE_RANK = ["parallel.pp=1", "parallel.dp=1", "train.microbatch_size=2", "train.eval_every=0"]


FULL = ["bash", "-c", "trap '' XFSZ; ulimit -f 20; exec \"$@\"", "bash"]  # files end at 20 KiB
POWERS = "-dac_override,-dac_read_search"  # root's rights to ignore file permissions
AS_A_USER = ["setpriv", f"--bounding-set={POWERS}"] if os.geteuid() == 0 else []
OFTEN = ["checkpoint.every=2", "checkpoint.keep=9"]


def spawn(directory, *overrides, under=()):
    """Start a run on one device, through the command `under`."""
    return start([*under, *train_command(directory, *ONE_RANK, *overrides, devices=1)])


LONG = ["train.seq_len=256", "train.grad_accum_steps=16"]  # steps that take longer than a save
MOMENTS = {  # kind of save: sizes of a step; seconds to the kill; steps of a life; most steps lost
    "waited for": ("false", [], 0.4, 20, 2),
    "in the background": ("true", [], 0.4, 20, 4),
    "in the background of a long step": ("true", LONG, 1.0, 6, 2),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the losses of an undisturbed run with the given settings."""

    @cache
    def of(*settings):
        directory = tmp_path_factory.mktemp("straight")
        output, _ = (process := spawn(directory, "checkpoint.every=0", *settings)).communicate()
        assert process.returncode == 0, output
        return losses(directory)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("how", MOMENTS)
def test_killed_at_any_moment_it_goes_on_from_the_last_save(tmp_path, straight, how):
    """Saves every second step, kill -9 at random moments; the run ends like an undisturbed one.

    At most the interval is lost and, with saves in the background, the steps trained during a save:
    none where a save takes less than a step, and never more than another interval.
    """
    asynchronous, sizes, latest, life, most = MOMENTS[how]
    cut = tmp_path / "cut"
    last, saves = life * KILLS, f"checkpoint.asynchronous={asynchronous}"
    steps, often = (
        [f"train.steps={last}", *sizes],
        ["checkpoint.every=2", "checkpoint.keep=3", saves],
    )
    chance, lost = random.Random(0), []
    for _ in range(KILLS):
        newest = max(complete(cut), default=0)
        process = spawn(cut, *often, *steps)
        line = ""
        while not line.startswith("step "):
            line = process.stdout.readline()
            assert line, "it ended before it was killed"
            if "resumed from step" in line:
                assert f"resumed from step {newest} " in line
        time.sleep(chance.uniform(0, latest))
        process.kill()
        process.communicate()
        lost.append(max(losses(cut)) - max(complete(cut), default=0))
    print("steps lost at each kill:", lost)  # noqa: T201 (shown by pytest -rP)
    assert max(lost) <= most
    output, _ = (process := spawn(cut, *often, *steps)).communicate()
    assert process.returncode == 0, output
    assert [path.name for path in (cut / "checkpoints").iterdir() if "tmp" in path.name] == []
    assert list(losses(cut)) == list(range(1, last + 1))
    want = list(straight(*steps).values())
    np.testing.assert_allclose(list(losses(cut).values()), want, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.slow(unless=["SIGTERM*"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 138), ("SIGHUP", 129)])
def test_a_signal_saves_and_stops(tmp_path, name, code):
    process = spawn(tmp_path, "train.steps=100000", "checkpoint.every=0")
    while "step 3/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert f"{name}: stopped after step {max(losses(tmp_path))}" in output
    assert complete(tmp_path) == [max(losses(tmp_path))]


@pytest.mark.slow
def test_a_terminal_that_closes_loses_no_step(tmp_path):
    """From then on all writes to it fail."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        train_command(tmp_path, *ONE_RANK, "train.steps=100000", "checkpoint.every=0", devices=1),
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(SMALL.parents[2])},
    )  # fmt: skip
    os.close(theirs)
    log = tmp_path / "metrics.jsonl"
    while not (log.exists() and '"step": 3,' in log.read_text()):
        assert os.read(ours, 1000)  # it would wait for a full terminal
    process.send_signal(signal.SIGHUP)  # as the system does for the process of a terminal
    os.close(ours)
    assert process.wait(60) == 129
    assert complete(tmp_path) == [max(losses(tmp_path))]


@pytest.mark.slow
def test_some_stay_for_good(tmp_path):
    options = ["checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=4"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *options, "train.steps=11"]) == 0
    assert complete(tmp_path) == [4, 8, 10, 11]


@pytest.mark.slow
def test_a_full_disk_stops_no_training_and_spoils_no_checkpoint(tmp_path):
    before = saved_at_4(tmp_path)
    process = spawn(tmp_path, "train.steps=8", *OFTEN, under=FULL)
    ends_without_saving(tmp_path, process, before)


@pytest.mark.slow
def test_a_directory_made_read_only_during_training_does_neither(tmp_path):
    if AS_A_USER and (
        not shutil.which("setpriv") or subprocess.run([*AS_A_USER, "true"]).returncode
    ):
        pytest.skip("root cannot give up its powers here")
    before = saved_at_4(tmp_path)
    process = spawn(tmp_path, "train.steps=8", *OFTEN, under=AS_A_USER)
    while "resumed from step 4" not in process.stdout.readline():
        assert process.poll() is None
    (tmp_path / "checkpoints").chmod(0o555)
    try:
        ends_without_saving(tmp_path, process, before)
    finally:
        (tmp_path / "checkpoints").chmod(0o755)


def saved_at_4(directory):
    """Return the files of a run's checkpoints of steps 2 and 4."""
    output, _ = (process := spawn(directory, "train.steps=4", *OFTEN)).communicate()
    assert process.returncode == 0, output
    return contents(directory / "checkpoints")


def ends_without_saving(directory, process, before):
    """Check that it trains to its end and reports the failed save; the run resumes from step 4."""
    output, _ = process.communicate()
    assert process.returncode == 4, output
    assert "a checkpoint could not be written" in output
    assert "Traceback" not in output
    assert "Event loop" not in output
    assert output.count("\n") < 40, output
    assert max(losses(directory)) == 8
    found = contents(directory / "checkpoints")
    assert {path: found[path] for path in before} == before
    assert complete(directory) == [2, 4]
    output, _ = (again := spawn(directory, "train.steps=8", *OFTEN)).communicate()
    assert again.returncode == 0, output
    assert "resumed from step 4" in output
    assert max(complete(directory)) == 8


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
