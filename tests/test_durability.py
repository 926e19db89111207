"""Crashes, signals and full disks: nothing that was saved is lost, nothing left behind confuses."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpipe import train

SMALL = Path(__file__).parent / "data" / "small.toml"
KILLS = int(os.environ.get("JAXPIPE_KILLS", "4"))  # more for a longer trial
ONE_RANK = ["parallel.pp=1", "parallel.dp=1", "train.microbatch_size=2", "train.eval_every=0"]


def losses(directory):
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def spawn(directory, *overrides, largest_file=None):
    """The command in a process of its own; files of over so many KiB fail as on a full disk."""
    command = [sys.executable, "-m", "jaxpipe.train", str(SMALL), f"run.dir={directory}"]
    if largest_file is not None:
        limit = f"trap '' XFSZ; ulimit -f {largest_file}; exec \"$@\""
        command = ["bash", "-c", limit, "bash", *command]
    return subprocess.Popen(
        [*command, "runtime.cpu_devices=1", *ONE_RANK, *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(SMALL.parents[2])},
    )  # fmt: skip


def complete(directory):
    """Steps of what is a checkpoint by its name."""
    saves = directory / "checkpoints"
    if not saves.exists():
        return []
    return sorted(int(path.name) for path in saves.iterdir() if path.name.isdecimal())


def test_killed_at_any_moment_it_goes_on_from_the_last_save(tmp_path):
    """Saves every second step, kill -9 at random moments; the run ends as if nothing had been."""
    cut, straight = tmp_path / "cut", tmp_path / "straight"
    steps, often = f"train.steps={40 * KILLS}", ["checkpoint.every=2", "checkpoint.keep=3"]
    chance, lost = random.Random(0), []
    for _ in range(KILLS):
        newest = max(complete(cut), default=0)
        process = spawn(cut, *often, steps)
        line = ""
        while not line.startswith("step "):
            line = process.stdout.readline()
            assert line, "it ended before it was killed"
            if "resumed from step" in line:
                assert f"resumed from step {newest} " in line
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        process.communicate()
        lost.append(max(losses(cut)) - max(complete(cut), default=0))
    assert max(lost) <= 6  # two until the next save begins, the rest while it is being written
    for directory, every in ((cut, often), (straight, ["checkpoint.every=0"])):
        output, _ = (process := spawn(directory, *every, steps)).communicate()
        assert process.returncode == 0, output
    assert [path.name for path in (cut / "checkpoints").iterdir() if "tmp" in path.name] == []
    assert list(losses(cut)) == list(range(1, 40 * KILLS + 1))
    np.testing.assert_allclose(
        list(losses(cut).values()), list(losses(straight).values()), rtol=1e-6
    )


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_saves_and_stops(tmp_path, name, code):
    process = spawn(tmp_path, "train.steps=100000", "checkpoint.every=0")
    while "step 3/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert f"{name}: stopped after step {max(losses(tmp_path))}" in output
    assert complete(tmp_path) == [max(losses(tmp_path))]


def test_some_stay_for_good(tmp_path):
    options = ["checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=4"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *options, "train.steps=11"]) == 0
    assert complete(tmp_path) == [4, 8, 10, 11]


def test_a_full_disk_stops_no_training_and_spoils_no_checkpoint(tmp_path):
    output, _ = (first := spawn(tmp_path, "train.steps=4", "checkpoint.every=2")).communicate()
    assert first.returncode == 0, output
    before = {path: path.read_bytes() for path in files(tmp_path / "checkpoints")}
    process = spawn(
        tmp_path, "train.steps=8", "checkpoint.every=2", "checkpoint.keep=9", largest_file=20
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "a checkpoint could not be written" in output
    assert max(losses(tmp_path)) == 8
    assert {path: path.read_bytes() for path in before} == before
    assert complete(tmp_path) == [2, 4]
    output, _ = (again := spawn(tmp_path, "train.steps=8", "checkpoint.every=2")).communicate()
    assert again.returncode == 0, output
    assert "resumed from step 4" in output
    assert max(complete(tmp_path)) == 8


def files(directory):
    return [path for path in directory.rglob("*") if path.is_file()]
