"""Residuals offloaded to host memory: results are bitwise equal, and none stay on the device.

On CPUs both memories are the same, so the tests check the memory space that the program requests.
"""

from math import prod

import jax
import numpy as np
import pytest
from orders import near
from programs import LAYERS_EACH, find_scan, traced
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import StageLayout, make_mesh

HOST = jax.memory.Space.Host
OF_PLACEMENTS = ("1f1b", "interleaved_zb", "zb_h1", "zbv", "dualpipe")  # and of split gradients


@pytest.mark.extended
@pytest.mark.slow(unless=["1f1b-1", "zb_h1-1"])
@pytest.mark.parametrize(
    ("name", "layers"), [*((name, 1) for name in OF_PLACEMENTS), ("1f1b", LAYERS_EACH)]
)
def test_the_same_bits(name, layers):
    """With NaN in every free slot, on the host too."""
    schedule = near(name, 2, 6)
    layout = StageLayout((LAYERS_EACH,) * schedule.stages, schedule.placement)
    shared, of_layers = toy_params(0, layout.layers)
    params = {"embed_head": shared, "layers": layout.stack(of_layers)}
    batch = toy_batch(1, schedule.microbatches, 2)
    mesh = make_mesh(2, devices=jax.devices()[:2])

    def step(offload_layers):
        execution = Execution(poison_bubbles=True, offload_layers=offload_layers)
        pipeline = Pipeline(TOY, schedule, mesh, execution=execution)
        return jax.jit(pipeline.losses_and_gradients)(params, batch)

    jax.tree.map(np.testing.assert_array_equal, step(layers), step(0))


def carried(name, offload_layers):
    """Return the bytes of the scan's carry on a device and on its host."""
    trace, _ = traced(name, 4, 8, offload_layers=offload_layers)
    held = {True: 0, False: 0}
    for var in find_scan(trace.jaxpr.jaxpr).outvars:
        held[var.aval.memory_space == HOST] += prod(var.aval.shape) * var.aval.dtype.itemsize
    return held[False], held[True]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_what_is_not_on_the_device_is_on_the_host(name):
    device, nothing = carried(name, 0)
    half, other = carried(name, 1)
    least, all_of_them = carried(name, LAYERS_EACH)
    assert nothing == 0
    assert other > 0
    assert half + other == least + all_of_them == device
    assert all_of_them == LAYERS_EACH * other


def test_the_stash_stays_on_the_device():
    device, _ = carried("zb_h1", 0)
    least, host = carried("zb_h1", LAYERS_EACH)
    assert device - host < least < device
