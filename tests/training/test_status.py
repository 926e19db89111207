"""`python -m jaxpipe.train --status RUN_DIR`, during a run and after it has died or ended."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from commands import SMALL, start, train_command
from several import start_all, wait_for_step

from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.run.watch import log_lines
from jaxpipe.run.watch import status as status_module
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.status import status
from jaxpipe.runtime.hang_cause import Report

SIZES = ["parallel.pp=2", "parallel.dp=1", "train.eval_every=0", "log.tensorboard=false"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_it_tells_whether_a_run_goes_on(tmp_path, monkeypatch, count):
    sizes = [*SIZES, "train.steps=100000", "checkpoint.every=5"]
    command = train_command(tmp_path, *sizes, devices=2 // count)
    group = start_all(count, command) if count > 1 else [start(command)]
    try:
        wait_for_step(tmp_path, 12)
        going = status(tmp_path)
    finally:
        for process in group:
            process.kill()
            process.communicate()  # also closes its pipes
    assert "checkpoints: 5" in going  # 10 may still be written
    for index in range(count):
        (line,) = [line for line in going.splitlines() if line.startswith(f"process {index}")]
        assert " is " in line
        assert "died" not in line
    monkeypatch.setattr("jaxpipe.run.watch.status._RECENT", -1.0)  # the time has passed
    dead = status(tmp_path)
    assert dead.count("died or is stopped") == count
    assert "hung" not in dead


@pytest.mark.extended
def test_a_run_that_is_over(tmp_path, capsys):
    sizes = ["train.steps=2", "train.eval_every=0", "log.tensorboard=false"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *sizes]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train.main(["--status", str(tmp_path)])
    assert ended.value.code == 0
    found = capsys.readouterr().out
    assert found.startswith(f"run {tmp_path.name}, in {tmp_path}\nstep 2: loss ")
    assert f"checkpoints: 2; the newest is {tmp_path / 'checkpoints' / '2'}\n" in found
    assert "has ended at" in found
    stacks = next(iter(tmp_path.glob("processes/*.json"))).read_text().split('"started":"')[1]
    folder = tmp_path / "hangs" / stacks.split('"')[0]
    folder.mkdir(parents=True)
    (folder / "process-0.txt").write_text("a stack")
    (tmp_path / "profile" / "process-0" / "plugins" / "profile" / "2026_11_25").mkdir(parents=True)
    listed = [
        f"profiles in {tmp_path / 'profile'}, recorded at 2026_11_25",
        f"the run hung: stacks of all threads are in {folder}",
    ]
    assert status(tmp_path).splitlines()[-2:] == listed
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *sizes]) == 0  # nothing to do
    said = " ".join(capsys.readouterr().out.split())
    assert all(line in said for line in listed)


@pytest.mark.extended
def test_a_folder_of_something_else_is_refused(tmp_path):
    command = [sys.executable, "-m", "jaxpipe.train", "--status", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path} is no directory of a run")


def test_a_run_that_cannot_be_read(monkeypatch):
    errors = [PermissionError(13, "Permission denied"), OSError(113, "No route to host")]

    def fail(self):
        raise errors[0]

    monkeypatch.setattr(Path, "exists", fail)
    for sentence in ("/run cannot be read .Permission denied.: give", "/run does not answer"):
        with pytest.raises(ConfigError, match=sentence):
            status("/run")
        errors.pop(0)


def test_the_newest_start_is_that_of_process_0_whatever_the_clocks(tmp_path):
    """Four processes; the clock goes back an hour, and two start again."""
    now = datetime.now(UTC)
    (tmp_path / "config.toml").touch()
    (tmp_path / "processes").mkdir()
    for process in range(4):
        at = now + timedelta(hours=process > 1)
        report = Report(
            process=process, started=at.strftime("%Y-%m-%dT%H-%M-%S"), beat=3, host="h", pid=1,
            written=at.isoformat(timespec="seconds"), phase="step", step=7, number=9, age=0.1,
            limit=60.0, finished=6, waits=0, where="x",
        )  # fmt: skip
        path = tmp_path / "processes" / f"process-{process}.json"
        path.write_bytes(msgspec.json.encode(report))
    lines = [line for line in status(tmp_path).splitlines() if line.startswith("process")]
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert all(" is running a step" in line for line in lines)
    for process in (0, 1):
        (tmp_path / "processes" / f"process-{process}.json").unlink()
    lines = [line for line in status(tmp_path).splitlines() if line.startswith("process")]
    assert all("which this machine's clock has not reached" in line for line in lines)


def test_only_the_end_of_a_log_is_read(tmp_path, monkeypatch):
    (tmp_path / "config.toml").touch()
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            file.write(f'{{"step": {step}, "loss": 2.0, "step_seconds": 0.5}}\n')
        file.write('{"step": 100001, "lo')
    monkeypatch.setattr(log_lines, "_BLOCK", 1000)
    reads = []

    class Counting(FileIO):
        def read(self, size=-1):
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(status_module, "open_binary", Counting)
    assert "\nstep 100000: loss 2.0000" in status(tmp_path)
    assert sum(reads) <= 2000
    log_path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, last_step=99_990) as log:
        log.write(99_991, {"loss": 1.0})
    lines = log_path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 99_992))


def test_a_run_whose_last_loss_is_not_finite(tmp_path):
    """JSON has no NaN; the line after it is damaged, or being written."""
    (tmp_path / "config.toml").touch()
    for rest in (b"", b"7", b"\xff"):
        line = b'{"step": 3, "loss": null, "step_seconds": 0.5}\n'
        (tmp_path / "metrics.jsonl").write_bytes(line + rest)
    assert "\nstep 3: loss not finite, 0.500 s a step" in status(tmp_path)


def test_the_steps_of_the_run_and_what_is_left(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 30, "loss": 2.0, "step_seconds": 0.5}\n')
    (tmp_path / "config.toml").write_text("[train]\nsteps = 150\n")
    assert "0.500 s a step, 150 steps in all: about 0:01:00 to go\n" in status(tmp_path)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 30\n")
    assert "150 steps" not in status(tmp_path)
    assert "0.500 s a step, the last\n" in status(tmp_path)


@pytest.mark.parametrize(
    ("settings", "name"),
    [('[run]\ndir = "/runs/first"', "first"), ('[run]\ndir = "."', ""), ("[run", ""), ("", "")],
)
def test_the_name_of_a_run_is_that_of_its_configured_folder(tmp_path, settings, name):
    """Also after the folder was moved; that of the folder where no other is known."""
    (tmp_path / "config.toml").write_text(settings)
    assert status(tmp_path).startswith(f"run {name or tmp_path.name}, in {tmp_path}\n")
