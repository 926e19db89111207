"""The files of a run directory on full disks and after damage: no content is lost."""

import contextlib
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
from commands import SMALL, losses, start, train_command
from event_files import read_events

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.runtime.storage.directory import AppendedFile, WriteGuard
from jaxpipe.runtime.storage.files import write_whole

ROOT = Path(__file__).parents[2]
ONE = ["parallel.pp=1", "parallel.dp=1", "train.eval_every=0"]


class FullDisk:
    """Makes writes fail, after a few bytes, while it is on."""

    on = True

    def __init__(self, monkeypatch):
        raw = AppendedFile._write

        def write(file, opened, record):
            class Full:
                fileno, truncate = opened.fileno, opened.truncate

                def write(self, rest):
                    opened.write(rest[:3])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            return raw(file, Full() if self.on else opened, record)

        monkeypatch.setattr(AppendedFile, "_write", write)


def test_records_that_cannot_be_written_wait_in_order(tmp_path, monkeypatch):
    disk, path = FullDisk(monkeypatch), tmp_path / "log"
    path.write_bytes(b"before\n")
    file, said = AppendedFile(path), []
    guard = WriteGuard(said.append)
    for record in (b"one\n", b"two\n"):
        with guard.attempt("log"):
            file.append(record)
    assert path.read_bytes() == b"before\n"  # no half of a record
    disk.on = False
    with guard.attempt("log"):
        file.append(b"three\n")
    assert path.read_bytes() == b"before\none\ntwo\nthree\n"
    assert [line.split("(")[0] for line in said] == [
        "warning: log cannot be written ", "log is written again",
    ]  # fmt: skip
    assert "No space left on device" in said[0]
    file.close()
    assert file.lost == 0


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.runtime.storage.directory._MOST_WAITING", 40)
    FullDisk(monkeypatch)
    file = AppendedFile(tmp_path / "log")
    for number in range(10):
        with pytest.raises(OSError, match="No space"):
            file.append(b"%09d\n" % number)
    assert file.lost == 6
    with pytest.raises(OSError, match="No space"):
        file.close()
    assert file.lost == 10


def test_event_files_are_whole_after_a_full_disk(tmp_path, monkeypatch):
    config = load(SMALL, [f"run.dir={tmp_path}", "log.tensorboard=true"])
    disk, said = FullDisk(monkeypatch), []
    guard = WriteGuard(said.append)
    with MetricsLog(tmp_path, last_step=2, loggers=open_loggers(config, 2), guard=guard) as log:
        for step in range(3, 8):
            disk.on = step in (4, 5)
            log.write(step, {"loss": step / 2, "counts": list(range(100))})
    first, begins, *rest = read_events(tmp_path / "tensorboard")
    assert first.file_version == "brain.Event:2"
    assert (begins.step, begins.session_log.status) == (3, 1)
    scalars = {e.step: e.summary.value[0].simple_value for e in rest if
               e.summary.value[0].tag == "loss"}  # fmt: skip
    assert scalars == {step: step / 2 for step in range(3, 8)}
    assert [e.step for e in rest if e.summary.value[0].HasField("histo")] == [3, 4, 5, 6, 7]
    assert len(said) == 4  # each of two files once, and once more when it works again
    assert list(losses(tmp_path)) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x80\n", b"\0" * 4096 + b"\n", b'{"step": 2, "lo\n', b"5\n[]\n{}\n",
               b'{"step": null}\n', b"[" * 100_000 + b"\n"],
)  # fmt: skip
def test_a_damaged_log_is_gone_on_with(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + damage + b'{"step": 2, "loss": 2.0}\n{"step')
    with MetricsLog(tmp_path, last_step=2) as log:
        log.write(3, {"loss": 3.0})
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert not path.with_name("metrics.jsonl.new").exists()


def test_a_whole_file_follows_no_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "config.toml.new").symlink_to(precious)
    write_whole(tmp_path / "config.toml", b"new")
    assert (precious.read_text(), (tmp_path / "config.toml").read_text()) == ("kept", "new")
    assert not (tmp_path / "config.toml").is_symlink()


@pytest.fixture
def tiny_disk(tmp_path):
    """Mount a file system of 400 KiB; return its directory."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tiny file system can only be mounted by root")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_disk_goes_on_and_writes_its_log_when_there_is_room(tiny_disk):
    """From the start: config.toml, starts.jsonl, metrics.jsonl and TensorBoard all fail."""
    run = tiny_disk / "run"
    fill = tiny_disk / "fill"
    fill.write_bytes(b"")
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass
    more = ["train.steps=3000", "checkpoint.every=0", "log.tensorboard=true", *ONE]
    process = start(train_command(run, *more, devices=1))
    output = ""
    while "step 40/" not in output:
        output += (line := process.stdout.readline())
        assert line, output
    fill.unlink()
    while "metrics.jsonl is written again" not in output:
        output += (line := process.stdout.readline())
        assert line, output
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    output += rest
    for name in ("config.toml", "starts.jsonl", "metrics.jsonl", "tensorboard"):
        assert output.count(f"{run / name} cannot be written (No space left on device)") == 1
    steps = list(losses(run))
    assert steps == list(range(1, steps[-1] + 1))
    assert "Traceback" not in output.partition("SIGTERM")[0]


@pytest.mark.slow
def test_an_output_that_cannot_be_written_ends_nothing(tmp_path):
    """A log file on a full disk, and a reader that is gone."""
    command = train_command(tmp_path / "run", "train.steps=2", *ONE, devices=1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment,
                             check=False)  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, b"")
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run([*command, "train.steps=4"], stdout=write, stderr=subprocess.PIPE,
                         env=environment, check=False)  # fmt: skip
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


@pytest.mark.extended
def test_a_recording_on_a_full_disk_is_reported(tmp_path, monkeypatch):
    """As XLA reports it; the steps go on, for the window of a run and for its bubbles alike."""
    import jax

    from jaxpipe.run.measure.recording import RecordingWindow, recording

    def lack():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lack)
    with pytest.raises(OSError, match="No space left"), recording(tmp_path):
        pass
    config, said = load(SMALL, [f"run.dir={tmp_path}", "log.profile_start=2"]), []
    with RecordingWindow(config, said.append) as window:
        for step in range(8):
            window.turn(step)
    (sentence,) = (line for line in said if line.startswith("warning"))
    assert "No space left on device" in sentence
    assert not any("are in" in line for line in said)
    more = ["train.steps=4", "train.eval_every=0", "log.bubble_every=2", "parallel.dp=2"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *more]) == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
