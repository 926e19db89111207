"""The run directory: one run at a time in it, and files that a full disk does not spoil."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.runtime import processes

Say = Callable[[str], None]
LOCK = ".lock"  # of a run directory
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_MOST_WAITING = 16 << 20  # bytes of a file that wait in memory until they can be written


@contextlib.contextmanager
def locked(directory: Path, say: Say) -> Iterator[None]:
    """Keep every other run out of a run directory, which is made, while the body runs.

    All processes of a run call it; the first one takes the lock for all. It is a POSIX lock on
    `<directory>/.lock`: it belongs to the process, so the kernel releases it however that ends and
    no forked worker inherits it, and NFS and Lustre (mounted with `flock`) keep it over all hosts.
    A file system without locks is reported by `say`.

    Raises `ConfigError`, in all processes, where another run holds it or the directory cannot be
    written.
    """
    lock, refusal = None, ""
    if processes.first():
        try:
            lock = _take(directory, say)
        except ConfigError as error:
            refusal = str(error)
    if processes.largest(int(bool(refusal))):
        raise ConfigError(refusal or f"run.dir={directory} is refused by the first process.")
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _take(directory: Path, say: Say) -> int:
    """The open lock file; it stays, since to remove it would let two runs hold locks of a name."""
    path = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"run.dir={directory} cannot be written ({error.strerror}): make it a writable "
            f"directory, or choose another."
        ) from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            say(
                f"warning: the file system of run.dir={directory} has no locks ({error.strerror}): "
                f"nothing keeps a second run out of it; start one at a time."
            )
            return lock
        holder = _holder(lock)
        os.close(lock)
        raise ConfigError(
            f"run.dir={directory} is used by another process{holder}: wait until it ends or stop "
            f"it, or give another run.dir."
        ) from error
    with contextlib.suppress(OSError):  # of a full disk: the lock holds without a name in it
        os.ftruncate(lock, 0)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.pwrite(lock, json.dumps(holder).encode(), 0)
    return lock


def _holder(lock: int) -> str:
    """Who wrote the lock file, in words; empty where it does not say."""
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
        return f" (pid {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class WriteGuard:
    """Lets a run go on where one of its files cannot be written, and reports that by `say`."""

    def __init__(self, say: Say):
        self.say = say
        self._failing: set[str] = set()

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Run the body, which writes `what`, and report its `OSError` instead of raising it.

        Of failures in a row the first is reported, and then the first success.
        """
        try:
            yield
        except OSError as error:
            if what not in self._failing:
                self._failing.add(what)
                self.say(
                    f"warning: {what} cannot be written ({error.strerror or error}): training goes "
                    f"on; make room, or make it writable."
                )
        else:
            if what in self._failing:
                self._failing.remove(what)
                self.say(f"{what} is written again")


class AppendedFile:
    """A file that grows by whole records, each written at once.

    A record that cannot be written whole leaves the file as it was and waits in memory, in order,
    for the next call; above 16 MiB the oldest are dropped, and counted in `lost`. `prepare`, if
    given, is called once, before the file is first opened. Its methods raise `OSError` where
    something is left unwritten.
    """

    def __init__(self, path: Path, prepare: Callable[[], None] | None = None):
        self.lost = 0
        self._path = path
        self._prepare = prepare
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def append(self, record: bytes) -> None:
        """Write a record after those that wait."""
        self._waiting.append(record)
        self._waiting_bytes += len(record)
        while len(self._waiting) > 1 and self._waiting_bytes > _MOST_WAITING:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Write all records that wait; make the file if it is not there."""
        if self._prepare:
            self._prepare()
            self._prepare = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        while self._waiting:
            self._write(self._file, self._waiting[0])
            self._waiting_bytes -= len(self._waiting.popleft())

    def _write(self, file: FileIO, record: bytes) -> None:
        size, rest = os.fstat(file.fileno()).st_size, memoryview(record)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            self._release()  # opened anew: a file of another host may have become stale
            raise

    def close(self) -> None:
        """Write what waits, and close the file; what still cannot be written is lost."""
        try:
            if self._waiting:
                self.flush()
        finally:
            self.lost += len(self._waiting)
            self._waiting.clear()
            self._release()

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it, so that under its name it is always whole.

    No link is followed: whatever has the name of the file that is being written is removed first.
    For files that one process writes at a time.
    """
    fresh = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh.unlink(missing_ok=True)
    try:
        with fresh.open("xb") as file:
            file.write(content)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
