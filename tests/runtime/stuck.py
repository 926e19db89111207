"""The training command, in which one process of a run gets stuck: `stuck.py PROCESS PLACE WAY ...`.

PROCESS is its index, PLACE a key of `PLACES`, WAY one of `WAYS`, and the rest are the command's own
arguments. The file named by STUCK_SINCE gets the time.
"""

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from jaxpipe import train
from jaxpipe.run import contexts, loop
from jaxpipe.runtime.position import PHASES
from jaxpipe.runtime.storage import files as storage

STEP = 5  # the first save is after step 4
FOREVER = 10**6  # seconds
REPORTED = 2.5  # seconds after which the watchdog has published where the process is


def wait_for_lock():
    lock = threading.Lock()
    holder = threading.Thread(target=lambda: (lock.acquire(), time.sleep(FOREVER)), daemon=True)
    holder.start()
    holder.join(0.1)
    lock.acquire()


def keep_gil():
    time.sleep(REPORTED)
    ctypes.PyDLL(None).sleep(FOREVER)


def stop():
    time.sleep(REPORTED)
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {
    "sleeps": lambda: time.sleep(FOREVER),
    "waits_for_lock": wait_for_lock,
    "keeps_gil": keep_gil,
    "is_stopped": stop,
}


def at_call(number, function, stuck):
    """Return the function, which gets stuck in that call, counted from 1."""
    calls = itertools.count(1)

    def called(*args, **kwargs):
        if next(calls) == number:
            stuck()
        return function(*args, **kwargs)

    return called


def in_data(stuck):
    loop.join_batches = at_call(STEP, loop.join_batches, stuck)


def in_start(stuck):
    contexts.open_run_data = at_call(1, contexts.open_run_data, stuck)


def in_save(stuck):
    storage.probe = at_call(2, storage.probe, stuck)  # the first call is before the run


def in_background_save(stuck):
    from jaxpipe.checkpoint.orbax_port import handler

    handler.write_checksums = at_call(1, handler.write_checksums, stuck)


def in_callback(stuck):
    """A host callback of a step; all processes have it in their program."""
    note = at_call(100, lambda tick: None, stuck)
    jax.debug.print = lambda text, **values: jax.debug.callback(note, values["tick"])


PLACES = {function.__name__: function for function in
          (in_data, in_start, in_save, in_background_save, in_callback)}  # fmt: skip


if __name__ == "__main__":
    process, place, way, *arguments = sys.argv[1:]
    is_stuck = os.environ.get("JAX_PROCESS_ID", "0") == process

    def stuck():
        if is_stuck:
            Path(os.environ["STUCK_SINCE"]).write_text(str(time.time()))
            WAYS[way]()

    if is_stuck or place == "in_callback":
        PLACES[place](stuck)
    if place == "in_start":  # nobody would wait for the real limit
        PHASES["open"] = PHASES["open"]._replace(least=40)
    sys.exit(train.main(arguments))
