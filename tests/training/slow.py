"""The training command, in which one process of a run is slow: `slow.py PROCESS WAY SECONDS ...`.

PROCESS is its index, WAY a key of `WAYS`, SECONDS what it sleeps each time, and the rest are the
command's own arguments.
"""

import os
import sys
import time

import jax

from jaxpipe import train
from jaxpipe.training import loop, progress


def after(function, seconds):
    """Return the function, which sleeps before it returns."""

    def called(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(seconds)
        return result

    return called


def in_data(seconds):
    loop._joined = after(loop._joined, seconds)


def on_host(seconds):
    progress.Progress.update = after(progress.Progress.update, seconds)


def in_ops(seconds):
    """A host callback in every tick; all processes have it in their program."""
    jax.debug.print = lambda text, **values: jax.debug.callback(
        lambda tick: time.sleep(seconds), values["tick"]
    )


WAYS = {function.__name__: function for function in (in_data, on_host, in_ops)}


if __name__ == "__main__":
    process, way, seconds, *arguments = sys.argv[1:]
    is_slow = os.environ["JAX_PROCESS_ID"] == process
    if is_slow or way == "in_ops":
        WAYS[way](float(seconds) * is_slow)
    sys.exit(train.main(arguments))
