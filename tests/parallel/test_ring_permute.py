"""The ring's permute, which only GPUs use, tested alone: all devices are in one branch here."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.parallel import ContextParallel, ReplicaFactors, make_mesh
from jaxpipe.parallel.mesh import REPLICA_AXES


@pytest.mark.parametrize(
    ("factors", "cp", "heads"),
    [
        (ReplicaFactors(), 4, 1), (ReplicaFactors(), 4, 2),
        (ReplicaFactors(), 8, 1), (ReplicaFactors(), 8, 2),
        (ReplicaFactors(ep=2), 2, 1), (ReplicaFactors(ep=2), 8, 4),
        (ReplicaFactors(rp=2), 4, 1), (ReplicaFactors(rp=2), 4, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_a_turn_brings_what_the_device_before_has(monkeypatch, cp, heads, factors, platform):
    monkeypatch.setattr(lax, "platform_dependent", lambda x, **branches: branches[platform](x))
    mesh = make_mesh(1, 8, devices=jax.devices()[:8], factors=factors)
    sequence = ContextParallel(cp, heads=heads)
    spec = PartitionSpec(REPLICA_AXES)
    run = jax.shard_map(
        sequence.after_exchange.rotate, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    # Replicas that share a sequence are neighbours; `heads` of them form one ring position.
    devices = np.arange(8.0).reshape(8 // cp, cp // heads, heads)
    before = np.roll(devices, 1, axis=1).reshape(8)
    np.testing.assert_array_equal(jax.jit(run)(np.arange(8.0)), before)
