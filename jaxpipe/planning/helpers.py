"""Worker processes that estimate candidates in parallel, since schedule builders are pure Python.

Builders and searches make millions of tuples and no reference cycles, so workers disable the cyclic
garbage collector.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module

_MANY = 1_000  # forwards (stages x microbatches) from which starting processes is worth it


@contextmanager
def helpers(forwards: int) -> Iterator[Executor | None]:
    """Yield a pool with one process per core for schedules of `forwards` forwards; None for few.

    Processes are started with `spawn`, since jax has threads. So only a command may ask for them,
    whose main module can be imported again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if forwards < _MANY or not cores or cores == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=begin) as pool:
        for _ in range(cores):
            pool.submit(os.getpid)  # start the imports now
        yield pool


def begin() -> None:
    """Initialise a worker: disable the garbage collector, and import what an estimate needs."""
    gc.disable()
    for module in ("jaxpipe.planning.cost.estimate", "jaxpipe.core.executor"):
        import_module(module)
