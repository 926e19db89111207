"""Signals that stop a run after the step in progress."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Append received SIGINT, SIGTERM, SIGUSR1 and SIGHUP to the yielded list.

    A second Ctrl-C interrupts. The other signals never do, because launchers repeat them while a
    run is saved. SIGHUP means that the terminal is closed: output to it is redirected to /dev/null.
    SIGHUP stays ignored under `nohup`.
    """
    received: list[int] = []
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            with open(os.devnull, "w") as nowhere:
                for stream in terminals:
                    os.dup2(nowhere.fileno(), stream)
        if number == signal.SIGINT and number in received:
            signal.default_int_handler(number, frame)
        received.append(number)

    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in stops}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
