"""Bytes that a compiled step of the toy needs, and those of its ring buffers by the tables."""

from functools import cache
from math import prod

import jax
from orders import near
from programs import LAYERS_EACH, traced
from toy import KIND, LENGTH, WIDTH, toy_batch, toy_params

from jaxpipe.core.contract import Context
from jaxpipe.core.executor.ring_buffers import ring_lengths, values_by_use
from jaxpipe.core.schedule import lower
from jaxpipe.core.split import POLICIES, split_layer

EXAMPLES = 256  # large enough that activations outweigh parameters and tables
X = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, WIDTH), "float32")


def size(tree):
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ring_bytes(schedule, remat):
    """Return the bytes of messages and the three classes of activations, from the tables."""
    _, (layer,) = toy_params(0, 1)
    microbatch = jax.tree.map(lambda a: a[0], toy_batch(1, 1, EXAMPLES))
    split = split_layer(KIND.layer, layer, X, Context(microbatch), POLICIES[remat])
    tables = lower(schedule)
    uses, _ = values_by_use(split.residuals, split.stash, separate=False)
    lengths = ring_lengths(uses, tables.rank_slots)
    held = sum(length * size(value) for value, length in lengths.items())
    return (tables.slots.inbox + 1) * size(X) + LAYERS_EACH * held


@cache
def measured(name, pp, microbatches, remat, build=near):
    """Return bytes of the compiled step's temporaries, and of the ring buffers among them."""
    trace, schedule = traced(name, pp, microbatches, build=build, examples=EXAMPLES, remat=remat)
    memory = trace.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes, ring_bytes(schedule, remat)


def check_rings(name, remat, build=near):
    """Check that a step needs no more than ring buffers and the working set of one tick, plus 15 %.

    The working set is measured: the memory of one rank with one microbatch without its ring
    buffers. A tick that runs an F together with a gradient needs it twice.
    """
    alone, own_rings = measured("gpipe", 1, 1, remat)
    total, rings = measured(name, 4, 8, remat, build)
    halves = 2 if name.startswith("dualpipe") else 1
    assert rings <= total <= 1.15 * (rings + halves * (alone - own_rings))


def growth(name, build=near):
    """Return the bytes that a further microbatch needs besides ring buffers, and in them."""
    (small, fewer), (large, rings) = (measured(name, 4, m, "full", build) for m in (8, 40))
    return ((large - rings) - (small - fewer)) / 32, (rings - fewer) / 32
