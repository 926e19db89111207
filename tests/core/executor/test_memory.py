"""The compiled step's memory against the memory that the tables imply."""

from functools import cache
from itertools import cycle
from math import prod

import jax
import pytest
from programs import LAYERS_EACH, traced
from toy import KIND, LENGTH, WIDTH, toy_batch, toy_params

from jaxpipe.core.contract import Context
from jaxpipe.core.executor.ring_buffers import ring_lengths, values_by_use
from jaxpipe.core.schedule import lower
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.schedules import BUILDERS, find_family

EXAMPLES = 256  # large enough that activations outweigh parameters and tables
X = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, WIDTH), "float32")
GROWS = {"gpipe", "bfs"}  # every microbatch has its F before any has its B
FLAT = [name for name in BUILDERS if name not in GROWS]


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
def measured(name, pp, microbatches, remat):
    """Return bytes of the compiled step's temporaries, and of the ring buffers among them."""
    trace, schedule = traced(name, pp, microbatches, examples=EXAMPLES, remat=remat)
    memory = trace.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes, ring_bytes(schedule, remat)


@pytest.mark.slow(unless=["1f1b-none", "v_half-full"])
@pytest.mark.parametrize(("name", "remat"), [*zip(FLAT, cycle(("none", "full")))])
def test_memory_is_the_rings_and_one_tick(name, remat):
    """The step uses no more than the ring buffers and the working set of one tick, plus 15 %.

    The working set is measured: the memory of one rank with one microbatch without its ring
    buffers. A tick that runs an F together with a gradient needs it twice.
    """
    alone, own_rings = measured("gpipe", 1, 1, remat)
    total, rings = measured(name, 4, 8, remat)
    halves = 2 if name.startswith("dualpipe") else 1
    assert rings <= total <= 1.15 * (rings + halves * (alone - own_rings))


@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("name", FLAT)
def test_memory_is_flat_in_microbatches(name):
    """Except for ring buffers, which a search may make shorter where there are few microbatches."""
    (small, fewer), (large, rings) = (measured(name, 4, m, "full") for m in (8, 40))
    assert ((large - rings) - (small - fewer)) / 32 <= 0.02 * size(X)
    assert fewer == rings or find_family(name).is_searched


@pytest.mark.parametrize("name", sorted(GROWS))
def test_memory_grows_by_the_residuals(name):
    (small, _), (large, _) = (measured(name, 4, m, "full") for m in (8, 40))
    assert (large - small) / 32 >= LAYERS_EACH * size(X)
