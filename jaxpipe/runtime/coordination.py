"""What the processes of a run tell each other outside of the devices: jax's coordination service.

Nothing that hosts agree on goes through devices. On CPU, XLA runs a program on one device of each
process beside one on all of them, and their messages, which carry no name, are then paired
wrongly: numbers of a step change without a word. So a collective is only ever part of a program
over all devices, which the main threads of all processes launch in the same order; everything else
is here. On GPUs the order of launches is that on the stream, but the host's words stay outside.

The service is `jax.distributed`'s: process 0 serves, each process has a client. The client is no
public part of jax, and only this module uses it.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

SILENT_SECONDS = 20  # without a sign of life of a process until the others end
_PERIOD = 2.0  # seconds between two signs of life
_NEWS, _ALIVE = "jaxpipe/news", "jaxpipe/alive"
_ADVICE = "the same command, also with fewer processes, goes on from the newest checkpoint"
_UNLIMITED = 2**31 - 1  # milliseconds: that another process is gone is seen by `Watch`, not here


class Service:
    """This process's access to what all processes share: values by key, and barriers.

    `index` is this process's number of `count`. All methods raise jax's `JaxRuntimeError` where
    the service is gone.
    """

    def __init__(self) -> None:
        from jax._src import distributed

        state = distributed.global_state
        self.client, self.index, self.count = state.client, state.process_id, state.num_processes
        self._calls = itertools.count()
        self._previous: str | None = None

    def gather(self, name: str, value: str) -> list[str]:
        """The value of each process, by its number. Waits until all main threads have called it."""
        folder = f"jaxpipe/gathered/{next(self._calls)}/{name}"
        found = self.gather_in(folder, value)
        if self._previous:  # all have read that one: they have called this one since
            self.client.key_value_delete(self._previous)
        self._previous = f"{folder}/{self.index}"
        return found

    def gather_in(self, folder: str, value: str, seconds: float | None = None) -> list[str]:
        """As `gather`, once for a folder, and at most so long."""
        self.client.key_value_set(f"{folder}/{self.index}", value)
        self.wait(folder, seconds)
        return [value for _, value in sorted(self.numbered(folder).items())]

    def wait(self, name: str, seconds: float | None = None) -> None:
        """Until all processes wait for this name, once; at most so long."""
        limit = _UNLIMITED if seconds is None else int(1000 * seconds)
        self.client.wait_at_barrier(name.replace("/", "-"), limit)

    def numbered(self, folder: str) -> dict[int, str]:
        """The values of a folder by the number that is the last part of their key."""
        pairs = self.client.key_value_dir_get(f"{folder}/")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}

    def from_first(self, key: str, value: str) -> str:
        """The value that process 0 gives for a key, once."""
        if self.index == 0:
            self.client.key_value_set(key, value)
            return value
        return self.client.blocking_key_value_get(key, _UNLIMITED)


class Watch(threading.Thread):
    """Hears news of the other processes while the main thread waits for devices.

    News are events that each process reads in the same order: one ends because of an error, all
    shall stop, the run is over. Each process also gives a sign of life now and then, and the first
    misses those that do not come. Where another process is gone this one ends, by `os._exit`: its
    devices may wait for the other's for ever, and jax would abort it without a sentence.
    """

    def __init__(self, service: Service):
        super().__init__(name="watch", daemon=True)
        self.service = service
        self._lock = threading.Lock()  # of the step that is reached, and of the end agreed on
        self._leaving = threading.Lock()  # is never released
        self._step, self._stop = -1, (sys.maxsize, 0)
        self._asked = False
        self._beats: dict[int, tuple[str, float]] = {}  # of each process the newest, and since when

    def take_aborts(self) -> None:
        """End with 3 and a sentence also where jax aborts this process, from a thread of its own.

        It does where the service is gone, most often before this watch hears of that, and takes no
        callback of Python for it (`missed_heartbeat_callback` of its client ends in `bad_cast`).
        """
        reason = "jax aborted this process, most often because another one is gone (see above)"
        self._aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._end(3, reason))
        ctypes.CDLL(None).signal(signal.SIGABRT, self._aborted)

    def reached(self, step: int, received: int) -> int:
        """The signal for which the run stops after this step, or 0: the same on all processes.

        All main threads call it after the same steps. `received` is a signal that this process has
        got, or 0. The first that has one asks for a stop; all then stop after the first step that
        no process had reached when it heard of that. Until that is known nobody goes on: it takes
        three messages, once in a run, and in no other step any.
        """
        if received and not self._asked:
            self._asked = True
            self._publish({"stop": received})
        with self._lock:
            self._step = step
            latest, number = self._stop
            return number if step > latest else 0

    def finish(self) -> None:
        """Meet the others at the end of the run, after which nobody watches any more."""
        self.service.wait("jaxpipe/end")
        if self.service.index == 0:
            self._publish({"over": True})
        self.join()

    def leave(self, code: int, reason: str) -> NoReturn:
        """End this process with a sentence, and the others because of it.

        They exit with 2 if the code is 2, for input that is bad for all, and else with 3.
        """
        self._say_once(code, reason)
        news = {"gone": self.service.index, "code": 2 if code == 2 else 3, "reason": reason}
        told = threading.Thread(target=self._publish, args=(news,), daemon=True)
        told.start()
        told.join(2)  # where the service is gone too, that is known by then, or never
        os._exit(code)

    def run(self) -> None:
        """Take news as they come."""
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
                self._end(3, f"process 0, at which the others meet, cannot be reached ({reason})")

    def _next(self, number: int) -> dict[str, Any] | None:
        """The event of that number, or None if it does not come within a period."""
        import jax

        try:
            key = f"{_NEWS}/{number}"
            return json.loads(self.service.client.blocking_key_value_get(key, int(1e3 * _PERIOD)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _publish(self, news: dict[str, Any]) -> None:
        """Make an event the next that all processes read."""
        import jax

        for number in itertools.count():
            try:
                self.service.client.key_value_set(f"{_NEWS}/{number}", json.dumps(news))
                return
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def _take(self, news: dict[str, Any]) -> None:
        """Do what an event asks for."""
        if "gone" in news:
            if news["gone"] != self.service.index:
                self._end(news["code"], f"process {news['gone']} ended: {news['reason']}")
            return
        number = news["stop"]
        if number not in signal.valid_signals():
            self._end(3, f"a process asked to stop for signal {number}, which is none")
        with self._lock:
            if self._stop[1]:
                return
            steps = self.service.gather_in("jaxpipe/stop", str(self._step), SILENT_SECONDS)
            self._stop = max(map(int, steps)), number

    def _live(self) -> None:
        """Give a sign of life, and as the first process look for those of the others."""
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
                self._publish({"gone": process, "code": 3, "reason": reason})
                self._end(3, f"process {process} ended: {reason}")

    def _end(self, code: int, reason: str) -> NoReturn:
        """End this process because of another."""
        self._say_once(code, reason)
        os._exit(code)

    def _say_once(self, code: int, reason: str) -> None:
        """Write the sentence, unless this process is ending for another reason already."""
        if not self._leaving.acquire(blocking=False):
            time.sleep(5)  # the one that said it ends the process by then
            return
        advice = "" if code == 2 else f"; {_ADVICE}"
        with contextlib.suppress(OSError):  # a terminal that is closed
            os.write(2, f"error: {reason}{advice}\n".encode())
