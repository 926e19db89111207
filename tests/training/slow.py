"""The training command, in which one process of a run is slow: `slow.py PROCESS WAY SECONDS ...`.

PROCESS is its index, or "any" for `in_spans`; WAY a key of `WAYS`, SECONDS what it sleeps each
time, and the rest are the command's own arguments.
"""

import os
import random
import sys
import time

import jax

from jaxpipe import train
from jaxpipe.model.families.llama.layers import LlamaAttention
from jaxpipe.run import loop
from jaxpipe.run.watch import progress
from jaxpipe.runtime import position

SPAN = 30  # steps of a span of `in_spans`


def after(function, seconds):
    """Return the function, which sleeps before it returns."""

    def called(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(seconds)
        return result

    return called


def in_data(seconds):
    loop.join_batches = after(loop.join_batches, seconds)


def on_host(seconds):
    progress.Progress.update = after(progress.Progress.update, seconds)


def in_ops(seconds):
    """A host callback in every tick; all processes have it in their program."""
    jax.debug.print = lambda text, **values: jax.debug.callback(
        lambda tick: time.sleep(seconds), values["tick"]
    )


def slow_process(span):
    """The process that is slow in a span of steps: one of four at random, in even spans none."""
    return random.Random(span).randrange(4) if span % 2 else None


def in_spans(seconds):
    """Every attention sleeps so long in F and twice as long in B, the slow one 20 % longer."""
    me = int(os.environ["JAX_PROCESS_ID"])

    def pause(times):
        is_slow = slow_process(position.now.step // SPAN) == me
        time.sleep(times * seconds * (1.2 if is_slow else 1.0))

    @jax.custom_vjp
    def sleeping(x):
        jax.debug.callback(lambda _: pause(1), x.ravel()[0])
        return x

    def backward(_, dy):
        jax.debug.callback(lambda _: pause(2), dy.ravel()[0])
        return (dy,)

    sleeping.defvjp(lambda x: (sleeping(x), None), backward)
    call = LlamaAttention.__call__
    LlamaAttention.__call__ = lambda self, x, *more: call(self, sleeping(x), *more)


WAYS = {function.__name__: function for function in (in_data, on_host, in_ops, in_spans)}


if __name__ == "__main__":
    process, way, seconds, *arguments = sys.argv[1:]
    is_slow = process in (os.environ["JAX_PROCESS_ID"], "any")
    if is_slow or way == "in_ops":
        WAYS[way](float(seconds) * is_slow)
    sys.exit(train.main(arguments))
