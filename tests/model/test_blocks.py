"""Attention computed block by block, on one device and in a ring, against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax import lax
from jax.sharding import PartitionSpec
from oracles import fused
from oracles.attention import attention_ref

from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.mesh import ContextParallel, ReplicaFactors, make_mesh, shard_batch
from jaxpipe.model.attention.blocks import KeyBlock, KeyRange, PlainBlocks, QueryBlock
from jaxpipe.model.attention.ring import RingLayout, ring_attention
from jaxpipe.model.kernels.cudnn_attention import FusedBlocks

B, L, H, G, K = 2, 32, 4, 2, 8
POSITIONS = jnp.array([[*range(12), *range(9), *range(11)], [*range(3), *range(25), 0, 0, 0, 0]])
HALVES = PlainBlocks(1)
SIGHTS = {"all": (0, None), "windows and documents": (6, POSITIONS)}


def operands(dtype):
    keys, heads = jax.random.split(jax.random.key(0), 4), (H, G, G, H)
    return [jax.random.normal(key, (B, L, h, K), dtype) for key, h in zip(keys, heads)]


def made(attention, operands, *key_range):
    """Return the output of attention and the gradients."""
    *qkv, weight = operands
    mixed, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *key_range), *qkv)
    return mixed, pull(weight)


def reference(q, k, v, window, positions):
    key_range = KeyRange.of(np.arange(L), B, window, positions)
    return attention_ref(QueryBlock(q, key_range), KeyBlock(k, v, key_range.own_BL))


def alone(depth):
    def attention(q, k, v, window, positions):
        key_range = KeyRange.of(np.arange(L), B, window, positions)
        layout = RingLayout(FULL_SEQUENCE, L, PlainBlocks(depth))
        return ring_attention(layout, q, k, v, key_range, jnp.int32(0))

    return attention


def around(size, blocks, ep=1, slices=1):
    """Return attention over `size` devices that share the sequence, slice by slice, gathered."""
    sequence, axes = ContextParallel(size, heads=1), PartitionSpec(("rp", "dp", "ep"))
    mesh = make_mesh(1, size, devices=jax.devices()[:size], factors=ReplicaFactors(ep=ep))
    own = L // (size * slices)
    layout = RingLayout(sequence, own, blocks)

    def shard(x):
        """Shard by slice and device: `[slices, size * B, own, ...]`."""
        return shard_batch({"": x[None]}, slices=slices, cp=size, dp=size, heads=1)[""]

    def attention(q, k, v, window, positions):
        def on_device(q, k, v, *position):
            whole_k, whole_v = (jnp.concatenate([*x], 1) for x in (k, v))

            def of_slice(given):
                i, q, *position = given
                places = i * (L // slices) + sequence.positions(own)
                key_range = KeyRange.of(places, B, window, *position or [None])
                later = jnp.arange(L // size)[None, :, None, None] >= (i + 1) * own
                so_far = (jnp.where(later, jnp.nan, x) for x in (whole_k, whole_v))
                return ring_attention(layout, q, *so_far, key_range, i * own)

            # A sequential loop, as over ticks: devices that can run two rings in either order
            # deadlock.
            return lax.map(of_slice, (jnp.arange(slices, dtype=jnp.int32), q, *position))

        given = (q, k, v) if positions is None else (q, k, v, positions)
        in_slices = PartitionSpec(None, *axes)
        run = jax.shard_map(
            on_device, mesh=mesh, in_specs=in_slices, out_specs=in_slices, check_vma=False
        )
        order = shard(jnp.broadcast_to(jnp.arange(L), (B, L)))
        mixed, at = (x.reshape(slices, size, B, own, -1) for x in (run(*map(shard, given)), order))
        mixed, at = (x.transpose(2, 0, 1, 3, 4).reshape(B, L, -1) for x in (mixed, at))
        return mixed[:, jnp.argsort(at[0, :, 0])].reshape(B, L, H, K)

    return attention


WAYS = {
    "one block": alone(0),
    "halvings": alone(3),
    "ring of 2": around(2, HALVES),
    "ring of 4": around(4, HALVES, ep=2),
    "slices in a ring": around(2, HALVES, slices=4),
}


@pytest.mark.parametrize("key_range", SIGHTS)
@pytest.mark.parametrize("way", WAYS)
def test_blocks_make_what_all_scores_make(way, key_range):
    with jax.enable_x64(True):
        given = operands(jnp.float64)
        got = jax.jit(lambda *given: made(WAYS[way], given, *SIGHTS[key_range]))(*given)
        assert_same(got, made(reference, given, *SIGHTS[key_range]))


@pytest.mark.parametrize(("size", "slices"), [(2, 1), (4, 1), (2, 4)])
def test_the_fused_kernel_makes_blocks_too(size, slices, monkeypatch):
    """All but cuDNN itself: its arguments, and how its blocks are combined."""
    fused.stands_in(monkeypatch)
    with jax.enable_x64(True):
        given, way = operands(jnp.float64), around(size, FusedBlocks(), slices=slices)
        got = jax.jit(lambda *given: made(way, given, 0, None))(*given)
        assert_same(got, made(reference, given, 0, None))


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_sums_over_blocks_are_wide(dtype, bound):
    """As close to float64 as one rounding of operands and results."""
    given = operands(dtype)
    got = jax.jit(lambda *given: made(WAYS["ring of 4"], given, 0, None))(*given)
    with jax.enable_x64(True):
        want = made(reference, [x.astype(jnp.float64) for x in given], 0, None)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert g.dtype == dtype
            assert jnp.linalg.norm(g.astype(jnp.float64) - w) < bound * jnp.linalg.norm(w)
