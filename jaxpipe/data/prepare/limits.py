"""Limits of time and memory for a part of a program that runs what strangers wrote."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


@contextmanager
def bounded(seconds: float, memory: int = 0) -> Iterator[None]:
    """Raise `TimeoutError` or `MemoryError` in a body that takes more than this [s, bytes].

    Memory is address space of the whole process beyond what it has at the start, so that a process
    with other threads should give no limit (0). Only a main thread can be interrupted: in another
    there is no limit of time.
    """
    with _limited_memory(memory) if memory else nullcontext(), _limited_time(seconds):
        yield


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limited_memory(memory: int) -> Iterator[None]:
    """Limit the address space, where the system says how much of it is used."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + memory, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
