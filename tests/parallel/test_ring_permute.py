"""The permute of a ring, which runs on GPUs only, by itself: all devices are in one branch here."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.parallel import ContextParallel, Factors, make_mesh
from jaxpipe.parallel.mesh import REPLICAS


@pytest.mark.parametrize(
    ("factors", "cp", "heads"),
    [
        (Factors(), 4, 1), (Factors(), 4, 2), (Factors(), 8, 1), (Factors(), 8, 2),
        (Factors(ep=2), 2, 1), (Factors(ep=2), 8, 4), (Factors(rp=2), 4, 1), (Factors(rp=2), 4, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_a_turn_brings_what_the_device_before_has(monkeypatch, cp, heads, factors, platform):
    monkeypatch.setattr(lax, "platform_dependent", lambda x, **branches: branches[platform](x))
    mesh = make_mesh(1, 8, devices=jax.devices()[:8], factors=factors)
    sequence = ContextParallel(cp, heads=heads)
    spec = PartitionSpec(REPLICAS)
    run = jax.shard_map(
        sequence.exchanged.turned, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    # Replicas that share a sequence are neighbours; of them `heads` are one place of the ring.
    devices = np.arange(8.0).reshape(8 // cp, cp // heads, heads)
    before = np.roll(devices, 1, axis=1).reshape(8)
    np.testing.assert_array_equal(jax.jit(run)(np.arange(8.0)), before)
