"""Communication between the processes of a run without devices, over jax's coordination service.

Nothing that hosts agree on goes through devices. On CPU, XLA runs a program on one device of each
process concurrently with a program on all devices. Their messages carry no name and are then paired
wrongly, so that a step's numbers change silently. Therefore a collective is only ever part of a
program over all devices, which the main threads of all processes launch in the same order, and all
other communication is in this module. On GPUs the order of launches is the order on the stream, but
the same rule holds.

The service belongs to `jax.distributed`: process 0 runs the server, and each process has a client.
Only this module uses the client.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jaxpipe.runtime.exit_code import ExitCode

SILENT_SECONDS = 20  # without a heartbeat of a process until the others exit
_PERIOD = 2.0  # seconds between two heartbeats
_LINGER = 2.0  # seconds from a process's message to its exit, where others wait for the reason
_ERROR_OF_FIRST, _ERROR_OF_OTHERS = "jaxpipe/error/first", "jaxpipe/error/others"
_NEWS, _ALIVE = "jaxpipe/news", "jaxpipe/alive"
_ADVICE = "the same command, also with fewer processes, goes on from the newest checkpoint"
_OF_ALL = (ExitCode.BAD_INPUT, ExitCode.HANG, ExitCode.NO_ANSWER)  # with which all exit
_INTRUDER = re.compile(r"(\d+) unexpectedly tried to connect")  # in jax's texts
_UNLIMITED = 2**31 - 1  # milliseconds; `Watch` notices that another process is gone


class DivergedError(RuntimeError):
    """The processes of a run make different calls, and would wait for each other for ever."""


class Service:
    """This process's client of the coordination service: values by key, and barriers.

    All methods raise jax's `JaxRuntimeError` if the service is gone.

    Attributes:
      client: jax's client.
      index: index of this process.
      count: number of processes.
    """

    def __init__(self) -> None:
        from jaxpipe.core.jax_internals import (
            distributed_state,  # commands import this file without jax
        )

        state = distributed_state()
        self.client, self.index, self.count = state.client, state.process_id, state.num_processes
        self._calls = itertools.count()
        self._previous: str | None = None

    def gather(self, name: str, value: str) -> list[str]:
        """The value of each process, by process index. Blocks until all main threads call it.

        Raises:
          DivergedError: a process calls it with another name, so that it is somewhere else.
        """
        folder = f"jaxpipe/gathered/{next(self._calls)}"
        pairs = [json.loads(text) for text in self.gather_in(folder, json.dumps([name, value]))]
        if self._previous:  # all have read it, since all have called this method again
            self.client.key_value_delete(self._previous)
        self._previous = f"{folder}/{self.index}"
        for index, (other, _) in enumerate(pairs):
            if other != pairs[0][0]:
                raise DivergedError(
                    f"process {index} is at {other!r} while process 0 is at {pairs[0][0]!r}: this "
                    f"is a fault of jaxpipe, or of code that it was given"
                )
        return [value for _, value in pairs]

    def gather_in(self, folder: str, value: str, seconds: float | None = None) -> list[str]:
        """Like `gather`, but once per folder, and with a timeout."""
        self.client.key_value_set(f"{folder}/{self.index}", value)
        self.wait(folder, seconds)
        return [value for _, value in sorted(self.numbered(folder).items())]

    def wait(self, name: str, seconds: float | None = None) -> None:
        """Block until all processes wait for this name; works once per name, with a timeout."""
        limit = _UNLIMITED if seconds is None else int(1000 * seconds)
        self.client.wait_at_barrier(name.replace("/", "-"), limit)

    def numbered(self, folder: str) -> dict[int, str]:
        """The values in a folder, by the number that ends their key."""
        pairs = self.client.key_value_dir_get(f"{folder}/")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}


class Watch(threading.Thread):
    """Thread that reads events of the other processes while the main thread waits for devices.

    All processes read the same events in the same order: a process exits because of an error, all
    shall stop, the run is over. Each process also sends heartbeats, and process 0 checks for
    missing ones. If another process is gone, this one exits by `os._exit`: its devices may
    otherwise wait for the other process for ever, and jax would abort it without a message.

    Attributes:
      service: this process's client.
      last_words: called before this process exits with code `ExitCode.HANG` because of another one.
    """

    def __init__(self, service: Service):
        super().__init__(name="watch", daemon=True)
        self.service = service
        self.last_words: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # guards the step that is reached, and the stop agreed on
        self._leaving = threading.Lock()  # never released: the first thread to acquire it exits
        self._step, self._stop_after = -1, (sys.maxsize, 0)
        self._asked = False
        self._intruder: threading.Thread | None = None
        self._beats: dict[int, tuple[str, float]] = {}  # newest heartbeat, its time

    def take_aborts(self) -> None:
        """Exit with `OTHERS_GONE` and a message also when jax aborts this process from a thread.

        jax does so if the service is gone, most often before this watch notices, or if it has an
        error. Its client accepts no Python callback for this case (`missed_heartbeat_callback` ends
        in `bad_cast`), and does not tell the error, but a barrier does.
        """

        def end(_: int) -> None:
            time.sleep(_LINGER)  # until the other thread has ended this process, if it knows why
            self._end(ExitCode.OTHERS_GONE, "jax aborted this process: another one is gone")

        self._aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._aborted)
        self._intruder = threading.Thread(target=self._await_intruder, daemon=True)
        self._intruder.start()

    def _await_intruder(self) -> None:
        """Exit if another program connects to the service as a process of this run.

        Process 0 waits at another barrier than the others, so both are passed by `finish` only.
        """
        try:
            self.service.wait(_ERROR_OF_FIRST if self.service.index == 0 else _ERROR_OF_OTHERS)
        except RuntimeError as error:
            if found := _INTRUDER.search(str(error)):
                self._end(
                    ExitCode.OTHERS_GONE,
                    f"another program has connected to JAX_COORDINATOR_ADDRESS as process "
                    f"{found[1]} of this run, so that jax ends it: let one start at a time use an "
                    f"address and port, on a network that others do not reach",
                )

    def reached(self, step: int, wanted: int) -> int:
        """The exit code with which the run stops after this step, or 0; equal on all processes.

        All main threads call it after the same steps. The first process that has received a signal,
        or whose data fail, asks for a stop. All processes then stop after the first step that no
        process had reached when it read the request; until that step is known none continues. This
        takes three messages, once in a run; other steps send none.

        Args:
          step: the step that this process has finished.
          wanted: the exit code with which this process wants to stop, or 0.
        """
        if wanted and not self._asked:
            self._asked = True
            self._publish({"stop": wanted})
        with self._lock:
            self._step = step
            latest, code = self._stop_after
            return code if step > latest else 0

    def finish(self) -> None:
        """Wait for the other processes at the end of the run, and stop watching."""
        self.service.wait("jaxpipe/end")
        if self._intruder:  # a call in progress could crash the end of the process
            self.service.wait(_ERROR_OF_OTHERS if self.service.index == 0 else _ERROR_OF_FIRST)
            self._intruder.join()
        if self.service.index == 0:
            self._publish({"over": True})
        self.join()

    def leave(self, code: int, reason: str) -> NoReturn:
        """Exit with a message, and make the other processes exit.

        They exit with the same code if it says something of the run, otherwise with `OTHERS_GONE`.
        """
        self._say_once(code, reason)
        announced = time.monotonic()
        theirs = code if code in _OF_ALL else ExitCode.OTHERS_GONE
        news = {"gone": self.service.index, "code": theirs, "reason": reason}
        told = threading.Thread(target=self._publish, args=(news,), daemon=True)
        told.start()
        told.join(2)  # if the service is gone too, the call has failed by then or never returns
        self._exit(code, time.monotonic() - announced)

    def run(self) -> None:
        """Handle events as they arrive."""
        import jax

        number = 0
        while True:
            try:
                news = self._next(number)
                if news is not None:
                    number += 1
                    if "over" in news:
                        return
                    self._take(news)
                self._live()
            except jax.errors.JaxRuntimeError as error:
                reason = str(error).partition("\n")[0]
                self._end(
                    ExitCode.OTHERS_GONE,
                    f"process 0, at which the others meet, cannot be reached ({reason})",
                )

    def _next(self, number: int) -> dict[str, Any] | None:
        """The event with that number, or None if it does not arrive within a period."""
        import jax

        try:
            key = f"{_NEWS}/{number}"
            return json.loads(self.service.client.blocking_key_value_get(key, int(1e3 * _PERIOD)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _publish(self, news: dict[str, Any]) -> None:
        """Append an event to the sequence that all processes read."""
        import jax

        for number in itertools.count():
            try:
                self.service.client.key_value_set(f"{_NEWS}/{number}", json.dumps(news))
                return
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def _take(self, news: dict[str, Any]) -> None:
        """Handle one event."""
        if "gone" in news:
            if news["gone"] != self.service.index:
                is_hang, reason = news["code"] == ExitCode.HANG, news["reason"]
                about = reason if is_hang else f"process {news['gone']} ended: {reason}"
                self._end(news["code"], about)
            return
        code = news["stop"]
        if code not in {*ExitCode, *(128 + number for number in signal.valid_signals())}:
            self._end(
                ExitCode.OTHERS_GONE,
                f"a process asked to stop with exit code {code}, which is none",
            )
        with self._lock:
            if self._stop_after[1]:
                return
            steps = self.service.gather_in("jaxpipe/stop", str(self._step), SILENT_SECONDS)
            self._stop_after = max(map(int, steps)), code

    def _live(self) -> None:
        """Send a heartbeat; process 0 also checks those of the others."""
        now, service = time.monotonic(), self.service
        mine = f"{_ALIVE}/{service.index}"
        service.client.key_value_set(mine, str(now), allow_overwrite=True)
        if service.index:
            return
        for process, beat in service.numbered(_ALIVE).items():
            last, since = self._beats.setdefault(process, (beat, now))
            if beat != last:
                self._beats[process] = beat, now
            elif now - since > SILENT_SECONDS:
                reason = f"no sign of life for {SILENT_SECONDS} seconds"
                self._publish({"gone": process, "code": ExitCode.OTHERS_GONE, "reason": reason})
                self._end(ExitCode.OTHERS_GONE, f"process {process} ended: {reason}")

    def _end(self, code: int, reason: str) -> NoReturn:
        """Exit because of another process."""
        self._say_once(code, reason)
        if code == ExitCode.HANG:
            self.last_words()
        self._exit(code)

    def _exit(self, code: int, waited: float = 0.0) -> NoReturn:
        if code == ExitCode.HANG or self.service.index == 0:
            # The first process to exit breaks the connections of the others, and the server ends
            # with process 0; they would report that in place of the reason, which reaches them or
            # (in a hang all are late by about the same time) which they find out in this time.
            time.sleep(max(_LINGER - waited, 0))
        os._exit(code)

    def _say_once(self, code: int, reason: str) -> None:
        """Print the message, unless this process is already exiting for another reason."""
        if not self._leaving.acquire(blocking=False):
            time.sleep(5)  # the thread that printed its message exits the process meanwhile
            return
        advice = "" if code == ExitCode.BAD_INPUT else f"; {_ADVICE}"
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, f"error: {reason}{advice}\n".encode())
