"""Schedules, each built and proved once: here, or where many are wanted by other processes.

Builders and searches are Python alone, of which a process does one thing after the other. They make
millions of tuples and no cycles, so no process looks for any.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from jaxpipe.schedule import Schedule, build, validate

_MANY = 1_000  # forwards of a stage and microbatch from which on processes are worth their start
_helpers: list[ProcessPoolExecutor] = []  # of `by_several`, while it lasts


@contextmanager
def by_several(forwards: int) -> Iterator[int]:
    """While it lasts `built` leaves the work to a process a core; yields how many there are.

    So several threads that ask for schedules, of about so many forwards each, get them at once; if
    they are short, there is no such process. Processes begin anew (`spawn`), since jax has threads:
    only a command may ask for them, whose module can be imported again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if forwards < _MANY or not cores or cores == 1:
        yield 1
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=gc.disable) as helpers:
        for _ in range(cores):
            helpers.submit(os.getpid)  # they begin to import
        _helpers.append(helpers)
        try:
            yield cores
        finally:
            _helpers.remove(helpers)


@cache
def built(name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    """The schedule of a builder and its options, proved (`schedule.validate`).

    Raises `ScheduleError` as `build` and `validate` do.
    """
    request = name, pp, microbatches, options
    return _helpers[-1].submit(_build, *request).result() if _helpers else _build(*request)


def _build(name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    schedule = build(name, pp=pp, microbatches=microbatches, **dict(options))
    validate(schedule)
    return schedule
