"""The lock of a run directory: one run at a time, and what a second one is told."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, losses, start, train_command

from jaxpipe import train
from jaxpipe.config import ConfigError, load
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.directory import LOCK, locked

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.directory import locked
with locked(Path(sys.argv[1]), print, Group()):
    print("held", flush=True)
    time.sleep(600)
"""
ONE = ["parallel.pp=1", "parallel.dp=1", "train.eval_every=0"]


@contextlib.contextmanager
def holder(directory):
    """Run another process that uses a run directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path, capsys):
    """Also a seed, an import and a record of routes; nothing on disk changes. kill -9 ends it."""
    command = [str(SMALL), f"run.dir={tmp_path}"]
    with holder(tmp_path) as first:
        before = contents(tmp_path)
        for more in ([], ["--seed-checkpoint"]):
            assert train.main([*command, *more]) == 2
            error = capsys.readouterr().err
            assert f"is used by another process (pid {first.pid} on " in error
            assert ", since 20" in error
            assert error.count("\n") == 1
        assert contents(tmp_path) == before
        with locked(tmp_path / "other", print, Group()):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with locked(tmp_path, print, Group()):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_refused_run_leaves_no_directory(tmp_path):
    def refuse(directory):
        with pytest.raises(ConfigError), locked(directory, print, Group()):
            raise ConfigError("no")

    refuse(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").touch()
    refuse(tmp_path / "used")
    assert sorted(os.listdir(tmp_path / "used")) == [LOCK, "metrics.jsonl"]


def test_a_lock_file_that_was_removed_is_not_the_lock(tmp_path, monkeypatch):
    """Another run removes the file after this one has opened it and before it is locked."""
    lockf, files = fcntl.lockf, []

    def remove_first(file, operation):
        if not files:
            (tmp_path / LOCK).unlink()
        files.append(file)
        lockf(file, operation)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    with locked(tmp_path, print, Group()):
        assert len(files) == 2
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.extended
def test_an_import_into_a_run_in_use_is_refused(tmp_path):
    with holder(tmp_path / "run"):
        ran = subprocess.run(
            [sys.executable, "-m", "jaxpipe.checkpoint", "import", str(tmp_path), str(SMALL),
             f"run.dir={tmp_path / 'run'}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 2
    assert "is used by another process" in ran.stderr


def test_a_lock_is_no_link_to_elsewhere(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        locked(tmp_path / "run", print, Group()),
    ):
        pass
    assert not (tmp_path / "precious").exists()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    said = []
    monkeypatch.setattr("fcntl.lockf", refuse)
    with locked(tmp_path, said.append, Group()):
        pass
    assert "has no locks" in said[0]


@pytest.mark.slow
def test_two_runs_at_once_are_one(tmp_path):
    """The second ends with 2, and the first is as if it had been alone."""
    more = ["train.steps=1000000", "checkpoint.every=0", "log.every=50", *ONE]
    first = start(train_command(tmp_path, *more, devices=1))
    while "step 50/" not in first.stdout.readline():
        assert first.poll() is None
    second = start(train_command(tmp_path, *more, "optimizer.lr=1e-9", devices=1))
    output, _ = second.communicate(timeout=120)
    assert (second.returncode, output.count("\n")) == (2, 1), output
    assert f"(pid {first.pid} on " in output
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode == 143
    steps = list(losses(tmp_path))
    assert steps == list(range(1, steps[-1] + 1))
    assert load(tmp_path / "config.toml").optimizer.lr == load(SMALL).optimizer.lr
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.extended
def test_all_processes_of_a_second_run_are_refused(tmp_path):
    """Only the first requests the lock, and no process waits forever."""
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with holder(tmp_path) as first:
        several = [
            start(
                train_command(tmp_path, "parallel.pp=2", "parallel.dp=1", devices=1),
                {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
                 "JAX_PROCESS_ID": str(index), "JAX_PLATFORMS": "cpu"}.items(),
            )
            for index in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=120)[0] for process in several]
    assert [process.returncode for process in several] == [2, 2], said
    for sentence in said:
        assert f"is used by another process (pid {first.pid} on " in sentence
