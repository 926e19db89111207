"""Attention made block by block, on one device and in a ring, against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.sharding import PartitionSpec
from oracles import fused

from jaxpipe.model.blocks import Keys, Products, Queries, Sight, attention_ref
from jaxpipe.model.fused import FusedBlocks
from jaxpipe.model.ring import ring_attention
from jaxpipe.model.sliced import sliced_attention
from jaxpipe.parallel import ContextParallel, Factors, make_mesh

B, L, H, G, K = 2, 32, 4, 2, 8
POSITIONS = jnp.array([[*range(12), *range(9), *range(11)], [*range(3), *range(25), 0, 0, 0, 0]])
HALVES = Products(1)
SIGHTS = {"all": (0, None), "windows and documents": (6, POSITIONS)}


def operands(dtype):
    keys, heads = jax.random.split(jax.random.key(0), 4), (H, G, G, H)
    return [jax.random.normal(key, (B, L, h, K), dtype) for key, h in zip(keys, heads)]


def made(attention, operands, *sight):
    """What queries mix, and the gradients."""
    *qkv, weight = operands
    mixed, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *sight), *qkv)
    return mixed, pull(weight)


def twin(q, k, v, window, positions):
    sight = Sight.of(np.arange(L), B, window, positions)
    return attention_ref(Queries(q, sight), Keys(k, v, sight.own_BL))


def alone(depth):
    def attention(q, k, v, window, positions):
        sight = Sight.of(np.arange(L), B, window, positions)
        return sliced_attention(L, Products(depth), q, k, v, sight, jnp.int32(0))

    return attention


def around(size, blocks, ep=1):
    """Of devices that share the sequence, put together again."""
    sequence, axes = ContextParallel(size, "ring"), PartitionSpec(("rp", "dp", "ep"))
    mesh = make_mesh(1, size, devices=jax.devices()[:size], factors=Factors(ep=ep))
    order = [half for i in range(size) for half in (i, 2 * size - 1 - i)]

    def attention(q, k, v, window, positions):
        def on_device(q, k, v, *own):
            sight = Sight.of(sequence.places(L // size), B, window, own[0] if own else None)
            return ring_attention(sequence, blocks, q, k, v, sight)

        whole = (q, k, v) if positions is None else (q, k, v, positions)
        dealt = [sequence.deal(x[None], size)[0] for x in whole]
        run = jax.shard_map(on_device, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
        halves = run(*dealt).reshape(size, B, 2, -1, H, K).transpose(0, 2, 1, 3, 4, 5)
        halves = halves.reshape(2 * size, B, -1, H, K)[np.argsort(order)]
        return halves.transpose(1, 0, 2, 3, 4).reshape(B, L, H, K)

    return attention


WAYS = {
    "one block": alone(0),
    "halvings": alone(3),
    "ring of 2": around(2, HALVES),
    "ring of 4": around(4, HALVES, ep=2),
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("way", WAYS)
def test_blocks_make_what_all_scores_make(way, sight):
    with jax.enable_x64(True):
        given = operands(jnp.float64)
        got = jax.jit(lambda *given: made(WAYS[way], given, *SIGHTS[sight]))(*given)
        assert_same(got, made(twin, given, *SIGHTS[sight]))


@pytest.mark.parametrize("size", [2, 4])
def test_the_fused_kernel_makes_blocks_too(size, monkeypatch):
    """All but cuDNN itself: what it is asked for, and how its blocks are put together."""
    fused.stands_in(monkeypatch)
    with jax.enable_x64(True):
        given, way = operands(jnp.float64), around(size, FusedBlocks())
        got = jax.jit(lambda *given: made(way, given, 0, None))(*given)
        assert_same(got, made(twin, given, 0, None))


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_sums_over_blocks_are_wide(dtype, bound):
    """As close to float64 as one rounding of operands and results."""
    given = operands(dtype)
    got = jax.jit(lambda *given: made(WAYS["ring of 4"], given, 0, None))(*given)
    with jax.enable_x64(True):
        want = made(twin, [x.astype(jnp.float64) for x in given], 0, None)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert g.dtype == dtype
            assert jnp.linalg.norm(g.astype(jnp.float64) - w) < bound * jnp.linalg.norm(w)
