"""One run at a time in a run directory, and full disks: no file content is lost."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, losses, start, train_command

from jaxpipe import train
from jaxpipe.config import ConfigError, load
from jaxpipe.runtime.directory import LOCK, AppendedFile, WriteGuard, locked, write_whole
from jaxpipe.training.boards import boards
from jaxpipe.training.metrics import MetricsLog

ROOT = Path(__file__).parents[1]
HOLD = """
import sys, time
from pathlib import Path
from jaxpipe.runtime.directory import locked
with locked(Path(sys.argv[1]), print):
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
        with locked(tmp_path / "other", print):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with locked(tmp_path, print):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_refused_run_leaves_no_directory(tmp_path):
    def refuse(directory):
        with pytest.raises(ConfigError), locked(directory, print):
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
    with locked(tmp_path, print):
        assert len(files) == 2
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


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
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "run", print):
        pass
    assert not (tmp_path / "precious").exists()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    said = []
    monkeypatch.setattr("fcntl.lockf", refuse)
    with locked(tmp_path, said.append):
        pass
    assert "has no locks" in said[0]


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
    monkeypatch.setattr("jaxpipe.runtime.directory._MOST_WAITING", 40)
    FullDisk(monkeypatch)
    file = AppendedFile(tmp_path / "log")
    for number in range(10):
        with pytest.raises(OSError, match="No space"):
            file.append(b"%09d\n" % number)
    assert file.lost == 6
    with pytest.raises(OSError, match="No space"):
        file.close()
    assert file.lost == 10


def crc32c(content):
    """Compute Castagnoli's checksum, bit by bit."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(content):
    value = crc32c(content)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(directory):
    """Return the events of the only file there, whose checksums are verified."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = directory.glob("events*")
    content, found = path.read_bytes(), []
    while content:
        length, check = struct.unpack("<QI", content[:12])
        assert check == masked(content[:8])
        data, (check,) = content[12 : 12 + length], struct.unpack("<I", content[12 + length :][:4])
        assert check == masked(data)
        found.append(Event.FromString(data))
        content = content[16 + length :]
    return found


def test_event_files_are_whole_after_a_full_disk(tmp_path, monkeypatch):
    config = load(SMALL, [f"run.dir={tmp_path}", "log.tensorboard=true"])
    disk, said = FullDisk(monkeypatch), []
    guard = WriteGuard(said.append)
    with MetricsLog(tmp_path, last_step=2, boards=boards(config, 2), guard=guard) as log:
        for step in range(3, 8):
            disk.on = step in (4, 5)
            log.write(step, {"loss": step / 2, "counts": list(range(100))})
    first, begins, *rest = events(tmp_path / "tensorboard")
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


def test_a_recording_on_a_full_disk_is_reported(tmp_path, monkeypatch):
    """As XLA reports it; the steps go on, for the window of a run and for its bubbles alike."""
    import jax

    from jaxpipe.training.recording import Window, recording

    def lack():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lack)
    with pytest.raises(OSError, match="No space left"), recording(tmp_path):
        pass
    config, said = load(SMALL, [f"run.dir={tmp_path}", "log.profile_start=2"]), []
    with Window(config, said.append) as window:
        for step in range(8):
            window.turn(step)
    (sentence,) = (line for line in said if line.startswith("warning"))
    assert "No space left on device" in sentence
    assert not any("are in" in line for line in said)
    more = ["train.steps=4", "train.eval_every=0", "log.bubble_every=2", "parallel.dp=2"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *more]) == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


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
    assert f"is used by another process (pid {first.pid} on " in said[0]
    assert "is refused by the first process" in said[1]
