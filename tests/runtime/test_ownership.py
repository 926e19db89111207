"""A run directory that another start uses, is put in its place, or is reached by a changed link."""

import json
import os
import signal
import socket
import threading
from datetime import UTC, datetime, timedelta

import pytest
from commands import SMALL, losses, start, train_command
from msgspec.structs import replace
from several import wait_for_step

from jaxpipe.config import ConfigError, RunConfig, load
from jaxpipe.runtime import processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import ownership
from jaxpipe.runtime.storage.directory import LOCK, locked, resolve_links
from jaxpipe.runtime.storage.ownership import OWNER, Ownership
from jaxpipe.runtime.storage.spool import Spool

REPORT = {
    "process": 0, "started": "2026-11-28T10-00-00", "beat": 3, "written": "", "host": "elsewhere",
    "pid": 1, "phase": "step", "step": 7, "number": 9, "age": 0.1, "limit": 60.0, "finished": 6,
    "waits": 0, "where": "x",
}  # fmt: skip


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    for name, seconds in {"_QUIET": 0.4, "_PATIENCE": 0.4, "_LOOK_SECONDS": 0.05}.items():
        monkeypatch.setattr(ownership, name, seconds)


def report(directory, age=0.0, **other):
    written = (datetime.now(UTC) - timedelta(seconds=age)).isoformat(timespec="seconds")
    path = directory / "processes" / "process-0.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(REPORT | {"written": written} | other))


def claim(directory, lock=None):
    return Ownership(Spool(str(directory), print, Group()), lock, Group())


@pytest.fixture
def left(monkeypatch):
    """The code and the sentence with which the process would have ended."""

    def leave(code, sentence):
        raise SystemExit(code, sentence)

    monkeypatch.setattr(processes, "leave", leave)


@pytest.mark.parametrize("age", [0.0, 300.0, -300.0])
def test_a_start_whose_processes_report_on_is_refused_whatever_the_clocks(tmp_path, age):
    over = threading.Event()

    def live():
        beat = 3
        while not over.wait(0.1):
            report(tmp_path, age, beat=(beat := beat + 1))

    report(tmp_path, age)
    threading.Thread(target=live).start()
    try:
        with pytest.raises(ConfigError, match=r"process 0 \(pid 1 on elsewhere\) still reports"):
            claim(tmp_path).__enter__()
    finally:
        over.set()
    assert not (tmp_path / OWNER).exists()


def test_a_start_that_was_killed_is_waited_for_once(tmp_path, capsys):
    report(tmp_path)
    with claim(tmp_path):
        said = capsys.readouterr().out
    assert "was written by process 0 (pid 1 on elsewhere) not long ago: waiting 0 s" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "gone",
    [
        {"over": True},
        {"age": 3600.0},
        {"age": -3600.0},
        {"host": socket.gethostname(), "pid": 2**22 + 1},
        {"host": socket.gethostname(), "pid": os.getpid()},
    ],
)
def test_a_start_that_is_gone_is_not_waited_for(tmp_path, capsys, gone):
    report(tmp_path, **gone)
    with claim(tmp_path) as owner:
        owner.check()
    assert not capsys.readouterr().out
    assert not (tmp_path / OWNER).exists()


def test_a_run_stops_once_another_start_has_taken_its_directory(tmp_path, left):
    with claim(tmp_path) as owner:
        owner.check()
        (tmp_path / OWNER).write_text('{"pid": 7, "host": "other", "since": "today"}')
        with pytest.raises(SystemExit) as ended:
            owner.check()
    code, sentence = ended.value.args
    assert code == 2
    assert "another start has taken it (pid 7 on other, since today); this run has" in sentence
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == 7  # is the other's


def test_a_run_stops_once_another_directory_is_in_place_of_its_own(tmp_path, left):
    run = tmp_path / "run"
    with locked(run, print, Group()) as lock, claim(run, lock) as owner:
        owner.check()
        run.rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK).touch()
        with pytest.raises(SystemExit, match="another directory is in its place"):
            owner.check()


def test_files_that_were_removed_are_written_and_locked_again(tmp_path):
    with locked(tmp_path, print, Group()) as lock, claim(tmp_path, lock) as owner:
        for name in (LOCK, OWNER):
            (tmp_path / name).unlink()
        owner.check()
        owner.check()
        assert (tmp_path / OWNER).exists()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_disk_that_does_not_answer_proves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(116, os.strerror(116))

    with locked(tmp_path, print, Group()) as lock, claim(tmp_path, lock) as owner:
        for name in ("read_bytes", "stat"):
            monkeypatch.setattr(f"pathlib.Path.{name}", fail)
            owner.check()
            monkeypatch.undo()


def test_comparisons_at_every_step_are_seconds_apart(tmp_path, left):
    with claim(tmp_path) as owner:
        owner.check()
        (tmp_path / OWNER).write_text("")
        owner.check_again()
        with pytest.raises(SystemExit):
            owner.check()


def test_links_are_followed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "A").mkdir()
    (tmp_path / "latest").symlink_to("A")
    (tmp_path / "loop").symlink_to("loop")
    config = load(SMALL)
    found = {
        given: resolve_links(replace(config, run=RunConfig(dir=given))).run.dir
        for given in ("runs/a", "latest", "latest/b", "loop", "s3://bucket/run", "../x")
    }
    assert found == {name: name for name in found} | {
        "latest": str(tmp_path.resolve() / "A"),
        "latest/b": str(tmp_path.resolve() / "A" / "b"),
    }


NO_LOCKS = """
import fcntl, os, socket
fcntl.lockf = lambda *_: None
socket.gethostname = lambda: os.environ["HOST_NAME"]
"""


@pytest.mark.slow
def test_a_run_that_was_stopped_while_another_went_on_writes_nothing(tmp_path):
    """On a file system whose locks hold on one host, as when a node comes back after a requeue."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_LOCKS)
    path = f"{tmp_path / 'site'}:{SMALL.parents[2]}"
    alone = ["parallel.pp=1", "parallel.dp=1", "train.eval_every=0", "checkpoint.every=20"]
    command = train_command(tmp_path / "run", *alone, "train.steps=100000", devices=1)
    first = start(command, {"PYTHONPATH": path, "HOST_NAME": "a"})
    try:
        wait_for_step(tmp_path / "run", 50)
        first.send_signal(signal.SIGSTOP)
        second = start(command, {"PYTHONPATH": path, "HOST_NAME": "b"})
        while "resumed from" not in (line := second.stdout.readline()):
            assert line, "it ended"
        begin = int(line.split("step ")[1].split()[0])
        wait_for_step(tmp_path / "run", begin + 200)
        first.send_signal(signal.SIGCONT)
        output, _ = first.communicate(timeout=60)
        assert first.returncode == 2, output
        assert "is no longer this run's: another start has taken it (pid " in output
        second.send_signal(signal.SIGTERM)
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 143, output
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    steps = list(losses(tmp_path / "run"))
    assert steps == list(range(1, steps[-1] + 1))


@pytest.mark.slow
def test_a_link_that_is_changed_does_not_move_a_run(tmp_path):
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("A")
    alone = ["parallel.pp=1", "parallel.dp=1", "train.eval_every=0", "checkpoint.every=10"]
    process = start(train_command(link, *alone, "train.steps=100000", devices=1))
    try:
        wait_for_step(tmp_path / "A", 20)
        link.unlink()
        link.symlink_to("B")
        wait_for_step(tmp_path / "A", 100)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert not list((tmp_path / "B").iterdir())
    assert max(int(path.name) for path in (tmp_path / "A/checkpoints").iterdir()) >= 100
