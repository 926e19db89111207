"""Whether a run directory is this start's alone, which its lock does not say everywhere.

A lock holds on one host only on some file systems (NFS with `nolock` or `local_lock`, Lustre with
`localflock`) and in object stores, and a directory may be replaced while a run goes on. Therefore a
start first sees whether processes of another start still report to the directory, and then leaves a
token in it, which it compares before it writes.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from datetime import UTC, datetime

from jaxpipe.config.paths import is_address
from jaxpipe.runtime import processes
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.hang_cause import Report
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.directory import RunLock
from jaxpipe.runtime.storage.errors import as_os_errors
from jaxpipe.runtime.storage.spool import Spool
from jaxpipe.runtime.watchdog import FILES, reports_in

OWNER = "owner.json"  # the file of the token
_LOOK_SECONDS = 1.0
_RECENT = 600.0  # a report that is older, or as far in the future, is of a process that has ended
# Seconds in which a process that lives reports again: it writes every 3 seconds, and uploads every
# 15 or so.
_QUIET, _QUIET_STORE = 10.0, 45.0
_PATIENCE = 30.0  # seconds more for processes of a start that has failed, which end within 20
_PERIOD, _PERIOD_STORE = 3.0, 15.0  # least seconds between comparisons that nobody insists on


class Ownership:
    """This start's claim to a run directory; a context manager around everything that writes there.

    All processes of a run enter it, before any of them reports its position.

    Args:
      spool: of the run directory.
      lock: its lock, in process 0.
      group: the processes of the run.

    Raises:
      ConfigError: in all processes on entering, if processes of another start still report.
    """

    def __init__(self, spool: Spool, lock: RunLock | None, group: Group):
        self._spool, self._lock, self._group = spool, lock, group
        self._path, self._token, self._compared = spool.shared / OWNER, b"", -float("inf")
        self._is_store = is_address(self._path)

    def __enter__(self) -> "Ownership":
        reason = ""
        if self._group.is_first:
            reason = self._await_others()
        self._group.refuse("claim to the run directory", reason)
        if self._group.is_first:
            holder = {
                "token": secrets.token_hex(8),
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            self._write(json.dumps(holder).encode())
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError), as_os_errors():
            if self._token and self._path.read_bytes() == self._token:
                self._path.unlink()

    def check_again(self) -> None:
        """`check`, if the last one was some seconds ago."""
        period = _PERIOD_STORE if self._is_store else _PERIOD
        if time.monotonic() - self._compared > period:
            self.check()

    def check(self) -> None:
        """End the run at once, with a sentence and code 2, if another start uses the directory.

        Nothing is written or removed then. Process 0 compares; the others do nothing, since their
        writes wait for it.
        """
        self._compared = time.monotonic()
        if reason := self._other():
            processes.leave(
                ExitCode.BAD_INPUT,
                f"run.dir={self._spool.shared} is no longer this run's: {reason}; this run has "
                f"stopped and writes nothing more there: let one start at a time use a run.dir.",
            )

    def _write(self, token: bytes) -> None:
        with contextlib.suppress(OSError):  # on a full disk the lock is all there is
            storage.write_whole(self._path, token)
            self._token = token

    def _other(self) -> str:
        """What shows that the directory is another's; "" if nothing does."""
        if self._lock and (reason := self._lock.fault()):
            return reason
        if not self._token:  # in other processes, and on a full disk
            return ""
        try:
            with as_os_errors():
                found = self._path.read_bytes()
        except FileNotFoundError:
            self._write(self._token)
            return ""
        except OSError:  # a disk or store that does not answer now proves nothing
            return ""
        return "" if found == self._token else f"another start has taken it{holder_in(found)}"

    def _await_others(self) -> str:
        """Wait until no process of another start reports; otherwise return who still does."""
        quiet = _QUIET_STORE if self._is_store else _QUIET
        begin = changed = time.monotonic()
        seen = self._alive()
        if seen:
            print(
                f"run.dir={self._spool.shared} was written by {_names(seen)} not long ago: waiting "
                f"{quiet:.0f} s to see whether another start still uses it",
                flush=True,
            )
        while seen:
            time.sleep(_LOOK_SECONDS)
            now, alive = time.monotonic(), self._alive()
            if any(one.beat != seen[key].beat for key, one in alive.items() if key in seen):
                changed = now
            seen |= alive  # a file that is being written may be unreadable for once
            if now - changed >= quiet:
                return ""
            if now - begin >= quiet + _PATIENCE:
                return (
                    f"run.dir={self._spool.shared} is used by another start: {_names(seen)} still "
                    f"reports to {FILES}/ there, whatever its lock says; stop it or wait until it "
                    f"ends, or give another run.dir."
                )
        return ""

    def _alive(self) -> dict[tuple[int, str], Report]:
        """The reports of processes that may live, by process and start."""
        texts: list[str] = []
        with contextlib.suppress(OSError):
            texts = self._spool.read_shared(FILES)
        return {(one.process, one.started): one for one in reports_in(texts) if _may_live(one)}


def holder_in(content: bytes) -> str:
    """The process that a lock or a token names, as words; "" if it names none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(content)
        return f" (pid {holder['pid']} on {holder['host']}, since {holder['since']})"
    return ""


def _may_live(report: Report) -> bool:
    """Whether the process of a report may still run; its clock may differ by minutes."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(report.written)).total_seconds()
    except (ValueError, TypeError):
        return False
    if report.over or abs(age) > _RECENT:
        return False
    if report.host != socket.gethostname():
        return True
    if report.pid == os.getpid():
        return False
    try:
        os.kill(report.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _names(reports: dict[tuple[int, str], Report]) -> str:
    first = min(reports.values(), key=lambda report: report.process)
    more = f" and {len(reports) - 1} more" * (len(reports) > 1)
    return f"{first.name}{more}"
