"""A ring step by a permute, as on GPUs, and by an all-gather, as on CPUs: the same values."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_blocks import HALVES, L, around, made, operands, reference

from jaxpipe.core.mesh import ContextParallel, ReplicaFactors, make_mesh

AXES = PartitionSpec(("rp", "dp", "ep"))
# Devices of a sequence, devices that exchange heads, all replicas, and the factors of the replicas.
RINGS = [
    (2, 1, 2, {}), (4, 1, 4, {}), (4, 1, 8, {}), (4, 2, 8, {}), (8, 1, 8, {}), (8, 2, 8, {}),
    (2, 1, 8, {"ep": 2}), (4, 1, 8, {"ep": 2}), (8, 2, 8, {"ep": 4}), (8, 4, 8, {"ep": 2}),
    (4, 1, 8, {"rp": 2}), (4, 2, 8, {"rp": 2}),
]  # fmt: skip
WAYS = ("_rotate_by_permute", "_rotate_by_gather", "rotate")


def rotation(size, heads, dp, factors, way):
    """Return a function of values `[dp]`, one per device: the values after one ring step."""
    ring = ContextParallel(size, heads).after_exchange
    mesh = make_mesh(1, dp, devices=jax.devices()[:dp], factors=ReplicaFactors(**factors))
    return jax.shard_map(
        getattr(ring, way), mesh=mesh, in_specs=AXES, out_specs=AXES, check_vma=False
    )


def before(size, heads, dp):
    """Return the sender of each device: `heads` to the left, cyclic in its group of `size`."""
    return [d // size * size + (d % size - heads) % size for d in range(dp)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ring", RINGS)
def test_a_rotation_brings_what_the_device_before_has(ring, way):
    size, heads, dp, _ = ring
    values = jnp.arange(dp) * 10
    got = jax.jit(rotation(*ring, way))(values)
    np.testing.assert_array_equal(got, 10 * np.array(before(size, heads, dp)))


@pytest.mark.parametrize("ring", RINGS)
def test_gpus_get_the_permute_alone(ring):
    """Lowered for GPUs, which needs no GPU."""
    size, heads, dp, _ = ring
    traced = jax.jit(rotation(*ring, "rotate")).trace(jnp.arange(dp))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "all_gather" not in text
    [pairs] = re.findall(r"collective_permute.*?source_target_pairs = dense<(.*?)>", text)
    found = sorted(json.loads(pairs), key=lambda pair: pair[1])
    assert found == [[of, to] for to, of in enumerate(before(size, heads, dp))]
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "collective_permute" not in on_cpu


@pytest.fixture
def permutes(monkeypatch):
    """Make CPUs use the permute too, which works if all devices are in the same branch."""
    by_permute = ContextParallel._rotate_by_permute
    monkeypatch.setattr(ContextParallel, "_rotate_by_gather", by_permute)


@pytest.mark.parametrize(("size", "ep"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("window", [0, 6])
def test_attention_in_a_ring_of_permutes(size, ep, window, permutes):
    """Attention and all three gradients, against all scores at once."""
    with jax.enable_x64(True):
        given = operands(jnp.float64)
        run = jax.jit(lambda *given: made(around(size, HALVES, ep=ep), given, window, None))
        assert "all_gather" not in run.lower(*given).as_text()
        for got, want in zip(
            jax.tree.leaves(run(*given)), jax.tree.leaves(made(reference, given, window, None))
        ):
            assert got.shape[1] == L
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
