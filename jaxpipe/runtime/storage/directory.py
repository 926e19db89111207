"""The run directory: its lock, and files that survive a full disk."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.errors import as_os_errors, remedy_of
from jaxpipe.runtime.storage.files import AnyPath

Say = Callable[[str], None]
LOCK = ".lock"  # name of the lock file in a run directory
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_SHARED_SECONDS = 60.0  # after which a file that another host has made must be seen, as on NFS
_LOOK_SECONDS = 0.1
_MOST_WAITING = 16 << 20  # bytes per file queued in memory until they can be written


class RunLock:
    """The lock of a run directory, which this process holds.

    Args:
      directory: the run directory.
      file: the open lock file.
    """

    def __init__(self, directory: Path, file: int):
        self._directory, self.file = directory, file

    def fault(self) -> str:
        """What shows that the directory at its path is not the locked one; "" if nothing does.

        A lock file that was removed is made and locked again.
        """
        path = self._directory / LOCK
        try:
            if os.path.samestat(os.fstat(self.file), path.stat()):
                return ""
        except FileNotFoundError:
            try:
                found = _take(self._directory, lambda _: None)
            except ConfigError:  # a directory that cannot be written is no other run's
                return "another process has locked it" if _is_there(path) else ""
            os.close(self.file)
            self.file = found
            return ""
        except OSError:  # a disk that does not answer now proves nothing
            return ""
        return "another directory is in its place"

    def release(self) -> None:
        """Give the lock up."""
        os.close(self.file)


def resolve_links(config: Config) -> Config:
    """The configuration with a `run.dir` without symbolic links: changed ones do not move a run.

    A path without links stays as it is, and an address.
    """
    text = config.run.dir
    try:
        resolved = Path(text).resolve()
    except (OSError, RuntimeError):  # a loop of links
        return config
    if is_address(text) or resolved == Path(os.path.abspath(text)):
        return config
    return replace(config, run=replace(config.run, dir=str(resolved)))


@contextlib.contextmanager
def locked(directory: Path, say: Say, group: Group) -> Iterator[RunLock | None]:
    """Hold the lock of a run directory while the body runs; creates the directory.

    It yields the lock in process 0, None in the others.

    All processes of a run call it; process 0 takes the lock for all. It is a POSIX lock on
    `<directory>/.lock`. It belongs to the process, so the kernel releases it however the process
    ends and forked workers do not inherit it. On NFS and Lustre (mounted with `flock`) it holds on
    all hosts. On a file system without locks `say` gets a warning instead. If the body raises
    `ConfigError` before anything else is in the directory, the directory is removed again.

    Args:
      directory: the run directory.
      say: prints a sentence.
      group: the processes of the run.

    Raises:
      ConfigError: in all processes, if another run holds the lock or the directory cannot be
        written.
    """
    lock, refusal = None, ""
    if group.is_first:
        try:
            lock = RunLock(directory, _take(directory, say))
        except ConfigError as error:
            refusal = str(error)
    group.refuse("lock of the run directory", refusal)
    try:
        yield lock
    except ConfigError:
        if lock is not None and os.listdir(directory) == [LOCK]:
            (directory / LOCK).unlink()
            directory.rmdir()
        raise
    finally:
        if lock is not None:
            lock.release()


def check_shared(directory: Path, group: Group) -> None:
    """Raise `ConfigError` in all processes unless all see the same directory.

    Each would save its own shards in its own directory, of which no checkpoint can be restored.
    """
    if group.count == 1:
        return
    mark = directory / group.from_first("mark in the run directory", lambda: _leave_mark(directory))
    end, reason = time.monotonic() + _SHARED_SECONDS, ""
    while not mark.exists() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    if not mark.exists():
        reason = (
            f"run.dir={directory} of process {group.index} is not that of process 0: put "
            f"it on a file system that all hosts share, or in an object store."
        )
    try:
        group.refuse("sight of the run directory", reason)
    finally:
        if group.is_first and mark != directory:
            mark.unlink(missing_ok=True)


def _leave_mark(directory: Path) -> str:
    name = f".shared-{secrets.token_hex(8)}"
    try:
        (directory / name).touch()
    except OSError:  # on a full disk nothing is compared
        return ""
    return name


def _take(directory: Path, say: Say) -> int:
    """Take the lock and return the open lock file."""
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
    if not _is_at(path, lock):
        os.close(lock)  # the run that held it has removed it: another may lock the next file
        return _take(directory, say)
    with contextlib.suppress(OSError):  # on a full disk the lock holds without its owner's name
        os.ftruncate(lock, 0)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.pwrite(lock, json.dumps(owner).encode(), 0)
    return lock


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _holder(lock: int) -> str:
    """The process named in the lock file, as words; empty if the file names none."""
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
        return f" (pid {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class WriteGuard:
    """Reports failed writes of a run, such as to its log, through `say` instead of stopping it."""

    def __init__(self, say: Say):
        self.say = say
        self._failing: set[str] = set()

    @contextlib.contextmanager
    def attempt(
        self,
        what: str,
        remedy: str = "",
        errors: type[Exception] = OSError,
    ) -> Iterator[None]:
        """Run the body, which writes `what`; report its errors instead of raising them.

        Among consecutive failures only the first is reported, and then the first success. Without
        a `remedy` the report has that of the error.
        """
        try:
            yield
        except errors as error:
            if what not in self._failing:
                self._failing.add(what)
                reason = getattr(error, "strerror", None) or first_line(error)
                advice = "".join(f"; {text}" for text in [remedy or remedy_of(error, "it")] if text)
                self.say(f"warning: {what} cannot be written ({reason}): training goes on{advice}.")
        else:
            if what in self._failing:
                self._failing.remove(what)
                self.say(f"{what} is written again")


class AppendedFile:
    """A file to which records are appended, each written immediately.

    A record that cannot be written completely leaves the file unchanged and is queued in memory, in
    order, until the next call. Above 16 MiB the oldest queued records are dropped.

    Args:
      path: the file.
      prepare: called once before the file is first opened, if given.

    Attributes:
      lost: number of dropped records.

    Raises:
      OSError: from any method that leaves records unwritten.
    """

    def __init__(self, path: Path, prepare: Callable[[], None] | None = None):
        self.lost = 0
        self._path = path
        self._prepare = prepare
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def append(self, record: bytes) -> None:
        """Write a record after the queued ones."""
        self._waiting.append(record)
        self._waiting_bytes += len(record)
        while len(self._waiting) > 1 and self._waiting_bytes > _MOST_WAITING:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Write all queued records; create the file if it does not exist."""
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
            self._release()  # reopened next time: the handle may be stale on a network file system
            raise

    def close(self) -> None:
        """Write the queued records and close the file; records that cannot be written are lost."""
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


def remove_with_folders(path: AnyPath, directory: AnyPath) -> None:
    """Remove a file, and the folders around it that are then empty, up to but not `directory`."""
    with contextlib.suppress(OSError), as_os_errors():
        path.unlink(missing_ok=True)
        if is_address(path):
            return  # folders of a store are only in the names of files
        for folder in path.relative_to(directory).parents[:-1]:
            (directory / folder).rmdir()
