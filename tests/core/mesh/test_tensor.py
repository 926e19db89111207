"""Sums over the devices that share a layer, and their gradients, against all shards on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.core.mesh import TensorParallel, VocabularyParallel, make_mesh

DEVICES = {
    "tp": TensorParallel(4),
    "pp and tp": VocabularyParallel.of(TensorParallel(2), ranks=2),
}


@pytest.mark.parametrize("name", DEVICES)
def test_a_statistic_of_all_shards_that_each_device_applies_to_its_own(name):
    """As a norm over all heads does: x / rms(x), here weighted."""
    devices, axes = DEVICES[name], DEVICES[name].axes
    sizes = (1, 4) if name == "tp" else (2, 2)
    mesh = make_mesh(pp=sizes[0], dp=1, tp=sizes[1], devices=jax.devices()[:4])

    def normed(x, devices=None):
        square = jnp.mean(x * x)
        if devices is not None:
            square = devices.joint_sum(square) / devices.size
        return x / jnp.sqrt(square)

    def of_shard(x, weight):
        value, back = jax.vjp(lambda x: normed(x, devices), x)
        return value, *back(weight)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, weight = rng.standard_normal((2, 12))
        specs = P(axes)
        sharded = jax.shard_map(
            of_shard, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
        )
        got = jax.jit(sharded)(x, weight)
        value, back = jax.vjp(normed, x)
        for one, other in zip(got, (value, *back(weight)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14)
