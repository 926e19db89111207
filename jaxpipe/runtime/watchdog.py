"""A thread in every process that ends a run that hangs, and says which process holds it up.

Nothing else does: devices wait for each other for ever, and jax notices only processes that are
dead. The main thread notes its phase and step (`position.py`). The watchdog publishes them every
few seconds, in the coordination service and in a file of the run directory. A process that stays in
a phase longer than its limit reads what the others publish, decides who is behind
(`hang_cause.py`), writes the stacks of all its threads, and exits with code `ExitCode.HANG`; the
others follow.

Each part works without another one that may be stuck itself:

- The service is process 0's. While process 0 is stopped it does not answer, and files are read.
- A call to the service or the file system that does not return is left to a thread of its own.
- A thread that keeps Python's lock (GIL) inside C code also stops the watchdog. The others then
  find that it is silent, and `faulthandler`'s timer, a thread of C, still writes its stacks.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxpipe.runtime import position, processes
from jaxpipe.runtime.activity import activity
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.hang_cause import Report, Verdict, verdict
from jaxpipe.runtime.storage.directory import remove_with_folders
from jaxpipe.runtime.storage.spool import Spool

Result = TypeVar("Result")

_WAKE = 1.0  # seconds between two looks at the main thread
_PERIOD = 3.0  # most seconds between two reports of a process
_GRACE = 2.0  # seconds that a report or a look may be late
_PATIENCE = 2.0  # seconds that a call to the service or the file system may take
_UPLOAD_PATIENCE = 10.0  # seconds that an upload of the stacks may take
_READ_AT_ONCE = 100  # processes that all read each other every second; more read less often
_C_TIMER = 15.0  # most seconds without Python's lock until stacks are written: before others exit
_MEASURES = 8  # looks within a limit whether a save moves
_KEYS = "jaxpipe/positions"
FILES, STACKS = "processes", "hangs"  # folders in the run directory


class Watchdog:
    """Ends a run that hangs; a context manager around everything after `processes.join`.

    With a timeout of 0 it does nothing. The processes of `group` all enter it.

    Attributes:
      place: coordinates of this process's devices on the mesh, for the sentence.
    """

    def __init__(self, timeout: position.Timeout, group: Group):
        self._group, self.place = group, ""
        self._timeout = timeout
        self._period = _PERIOD if timeout == "auto" else min(_PERIOD, timeout / 5)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._store, self._disk, self._network = _Patient(), _Patient(), _Patient()
        self._spool: Spool | None = None
        self._stacks: Any = None  # open file for stacks
        self._over = False
        self._resumed = -float("inf")  # when the process last went on after it was stopped
        self._meter = _Patient()
        self._metered: tuple[int, object] = (-1, None)  # number of the phase, and the measure
        self._measured = -float("inf")
        self._beat, self._published, self._answered = 0, -float("inf"), time.monotonic()
        self._heard: dict[int, tuple[int, float, bool]] = {}  # beat, its time, whether it is new

    def __enter__(self) -> "Watchdog":
        if not self._timeout:
            return self
        watch = processes.watch()
        self._service = watch.service if watch else None
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
        started = self._group.from_first("time of the start", lambda: now)
        if watch:
            watch.last_words = self._write_stacks
        self._started, self._main = started, threading.get_ident()
        self._index, self._count = self._group.index, self._group.count
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread:
            self._thread.join(2 * _PATIENCE)

    @contextlib.contextmanager
    def files_in(self, spool: Spool) -> Iterator[None]:
        """Use the folder of this run, whose lock it has, while the body runs.

        The file for stacks is removed at the end: it is empty unless the run hangs. The position
        stays, except if the run is refused, which leaves the directory as it was.
        """
        if not self._thread:
            yield
            return
        directory = spool.folder
        path = directory / FILES / f"process-{self._index}.json"
        before = path.read_text() if path.exists() else ""
        self._spool, is_refused = spool, False
        self._publish(self._report())  # at once: the first steps may take less than a period
        try:
            yield
        except ValueError:  # `ConfigError`, also that of a schedule
            is_refused = True
            raise
        finally:
            self.__exit__()
            self._over = True
            self._publish(self._report())
            faulthandler.cancel_dump_traceback_later()
            if self._stacks:
                self._stacks.close()
                remove_with_folders(Path(self._stacks.name), directory)
            if is_refused and not before:
                remove_with_folders(path, directory)
            elif is_refused:
                self._disk.call(lambda: _overwrite(path, before))

    def _run(self) -> None:
        """Publish, and look at the others once this process is late."""
        read = -float("inf")
        while not self._is_closed_soon():
            self._arm()
            self._measure()
            report, time_now = self._report(), time.monotonic()
            if time_now - self._published >= self._period:
                self._publish(report)
            if report.age <= report.limit:
                self._heard.clear()
            elif time_now - read >= self._count / _READ_AT_ONCE:
                read = time_now
                if found := self._judge(report):
                    self._write_stacks()
                    processes.leave(ExitCode.HANG, self._sentence(found))

    def _measure(self) -> None:
        """Beat where what the main thread waits for has moved (`position.metered`)."""
        now, time_now, measure = position.now, time.monotonic(), position.meter
        idle = time_now - max(now.since, position.moved, self._measured)
        if measure is None or idle < position.limit(self._timeout, now.phase) / _MEASURES:
            return
        self._measured = time_now
        if (measured := self._meter.call(measure)) is None:
            return
        before, self._metered = self._metered, (now.number, measured)
        if before[0] == now.number and before[1] != measured:
            position.beat()

    def _is_closed_soon(self) -> bool:
        """Wait until the next look; a process that was stopped meanwhile was not stuck."""
        begin = time.monotonic()
        closed, end = self._closed.wait(_WAKE), time.monotonic()
        if end - begin > _WAKE + _GRACE:
            self._resumed = end
        return closed

    def _report(self) -> Report:
        now, doing = position.now, activity(self._main)
        phase = "compile" if doing.compiles else now.phase
        return Report(
            process=self._index,
            started=self._started,
            beat=self._beat,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            host=socket.gethostname(),
            pid=os.getpid(),
            place=self.place,
            phase=phase,
            step=now.step,
            number=now.number,
            age=time.monotonic() - max(now.since, position.moved, self._resumed),
            limit=position.limit(self._timeout, phase),
            finished=position.finished.step,
            waits=doing.waits,
            where=doing.where,
            unanswered=time.monotonic() - self._answered if self._service else 0.0,
            over=self._over,
        )

    def _publish(self, report: Report) -> None:
        """Put the report into the coordination service and into this process's file."""
        self._published = time.monotonic()
        self._beat += 1
        text = msgspec.json.encode(report).decode()
        name, answered = f"{FILES}/process-{self._index}.json", None
        if service := self._service:
            key = f"{_KEYS}/{self._index}"
            answered = self._store.call(
                lambda: service.client.key_value_set(key, text, allow_overwrite=True) or True
            )
        if answered:
            self._answered = time.monotonic()
        if spool := self._spool:
            self._disk.call(lambda: _overwrite(spool.folder / name, text))
            if self._service and not answered:
                self._network.call(lambda: spool.share(name, text))

    def _judge(self, own: Report) -> Verdict | None:
        """The verdict, or None while it is not yet known which processes still send reports."""
        reports, time_now = {**self._read(), self._index: own}, time.monotonic()
        for process in range(self._count):
            beat = reports[process].beat if process in reports else -1
            before, since, new = self._heard.get(process, (beat, time_now, process == own.process))
            if beat > before:  # a file may be older than what the service had
                self._heard[process] = beat, time_now, True
            else:
                self._heard[process] = before, since, new
        over = {process for process, report in reports.items() if report.over}
        waited = {
            process: time_now - since
            for process, (_, since, _) in self._heard.items()
            if process not in {*over, own.process}
        }
        silent = {p: seconds for p, seconds in waited.items() if seconds > self._period + _GRACE}
        if any(not self._heard[p][2] and p not in silent for p in waited):
            return None
        return verdict(reports.values(), silent, self._count)

    def _read(self) -> dict[int, Report]:
        """The newest report of each process: from the service, and from files.

        Files have the reports of processes that do not reach the service.
        """
        if not (service := self._service):
            return {}
        texts = self._store.call(lambda: list(service.numbered(_KEYS).values())) or []
        if spool := self._spool:
            texts += self._network.call(lambda: spool.read_shared(FILES)) or []
        reports = sorted(reports_in(texts, self._started), key=lambda report: report.beat)
        return {report.process: report for report in reports}

    def _sentence(self, found: Verdict) -> str:
        folder = self._spool and self._spool.shared / STACKS / self._started
        return f"{found.sentence}; stacks of all threads: {folder or 'not written, no run.dir yet'}"

    def _arm(self) -> None:
        """Let C code write the stacks if this thread is not scheduled again for a while."""
        if not self._stacks and self._spool:
            folder = self._spool.folder / STACKS
            self._disk.call(lambda: self._open(folder))
        if self._stacks:
            seconds = _C_TIMER if self._timeout == "auto" else min(_C_TIMER, self._timeout)
            faulthandler.dump_traceback_later(max(seconds, 2 * _WAKE), file=self._stacks)

    def _open(self, folder: Path) -> None:
        """Open the file for stacks; process 0 removes the empty ones of runs that were killed."""
        own = folder / self._started
        own.mkdir(parents=True, exist_ok=True)
        self._stacks = (own / f"process-{self._index}.txt").open("w")
        for path in folder.glob("*/*.txt") if self._index == 0 else ():
            if path.parent != own and not path.stat().st_size:
                remove_with_folders(path, folder.parent)

    def _write_stacks(self) -> None:
        """Write the stacks of all threads, if the file system lets us."""
        if stacks := self._stacks:
            faulthandler.cancel_dump_traceback_later()
            _Patient().call(lambda: faulthandler.dump_traceback(stacks, all_threads=True))
        if spool := self._spool:
            _Patient(_UPLOAD_PATIENCE).call(spool.upload)


class _Patient:
    """Makes calls that may never return, each in a thread; one that still runs stops the next."""

    def __init__(self, seconds: float = _PATIENCE) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Result]) -> Result | None:
        """The result, or None if the call fails or does not return in time."""
        if self._thread and self._thread.is_alive():
            return None
        results: list[Result] = []

        def run() -> None:
            with contextlib.suppress(OSError, RuntimeError):  # jax's errors are RuntimeErrors
                results.append(function())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._thread.join(self._seconds)
        return results[0] if results else None


def reports_in(texts: list[str], started: str | None = None) -> Iterator[Report]:
    """Yield the reports of the run started then (None: of any), without unreadable ones."""
    for text in texts:
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            report = msgspec.json.decode(text, type=Report)
            if started in (None, report.started):
                yield report


def place_of(mesh: Any) -> str:
    """This process's coordinates on the mesh axes with more than one device, as `pp=0..1 dp=0`."""
    import jax

    own = np.vectorize(lambda device: device.process_index == jax.process_index())(mesh.devices)
    parts = []
    for axis, name in enumerate(mesh.axis_names):
        if mesh.devices.shape[axis] > 1:
            found = np.unique(np.nonzero(own)[axis])
            first, last = found[0], found[-1]
            parts.append(f"{name}={first}" + (f"..{last}" if last > first else ""))
    return " ".join(parts)


def _overwrite(path: Path, text: str) -> None:
    """Write a small file in place by one call, so that a reader finds it complete.

    A new file, as `write_whole` makes, could not be written to a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(file, os.pwrite(file, text.encode(), 0))
    finally:
        os.close(file)
