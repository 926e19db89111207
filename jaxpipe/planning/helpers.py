"""Processes that price candidates: builders and searches are Python alone, one thing at a time.

They make millions of tuples and no cycles, so no process looks for any.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module

_MANY = 1_000  # forwards of a stage and microbatch from which on processes are worth their start


@contextmanager
def helpers(forwards: int) -> Iterator[Executor | None]:
    """A process a core, for schedules of about so many forwards each; None where they are short.

    Processes begin anew (`spawn`), since jax has threads: only a command may ask for them, whose
    module can be imported again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if forwards < _MANY or not cores or cores == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=begin) as pool:
        for _ in range(cores):
            pool.submit(os.getpid)  # they begin to import
        yield pool


def begin() -> None:
    """What a process does first: no search for cycles, and the imports of an estimate."""
    gc.disable()
    for module in ("jaxpipe.planning.estimate", "jaxpipe.pipeline"):
        import_module(module)
