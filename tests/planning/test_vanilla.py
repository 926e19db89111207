"""The vanilla transformer against the totals and columns that the papers print."""

import jax
import jax.numpy as jnp
import pytest
from counting import dot_flops
from oracles.flops import OpFlops
from oracles.vanilla import ActivationBytes, VanillaSizes, vanilla_bytes, vanilla_flops

SIZES = [
    VanillaSizes(s=1024, b=1, h=2304, a=24),
    VanillaSizes(s=1024, b=6, h=6144, a=48, t=8),
    VanillaSizes(s=6, b=5, h=8, a=2, t=2),
]
ATTENTION = {
    "qkv input", "q and k", "softmax output", "softmax dropout mask", "softmax dropout output",
    "v", "out input", "attention dropout mask",
}  # fmt: skip
MLP = {"up input", "gelu input", "down input", "mlp dropout mask"}
NORMS = {"layer norm 1 input", "layer norm 2 input"}


def until_b(items, names=None):
    return sum(item.until_b for name, item in items.items() if names is None or name in names)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_flops_are_table_1(sizes):
    s, b, h, t = sizes.s, sizes.b, sizes.h, sizes.t
    items = vanilla_flops(sizes)
    assert sum(items.values(), OpFlops()) == OpFlops(
        F=s * b * h * (24 * h + 4 * s) / t,
        B=s * b * h * (24 * h + 8 * s) / t,
        W=s * b * h * 24 * h / t,
    )
    assert {name: item.F * t for name, item in items.items()} == {
        "qkv": 6 * b * s * h**2,
        "scores": 2 * b * s**2 * h,
        "scores @ v": 2 * b * s**2 * h,
        "out": 2 * b * s * h**2,
        "up": 8 * b * s * h**2,
        "down": 8 * b * s * h**2,
    }
    assert [name for name, item in items.items() if not item.W] == ["scores", "scores @ v"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bytes_are_table_1_and_the_tensor_parallel_column(sizes):
    s, b, h, a, t = sizes.s, sizes.b, sizes.h, sizes.a, sizes.t
    sbh, square = s * b * h, a * s**2 * b
    items = vanilla_bytes(sizes)
    assert items.keys() == ATTENTION | MLP | NORMS
    assert until_b(items, ATTENTION) == 3 * sbh + 8 * sbh / t + 5 * square / t
    assert until_b(items, MLP) == 3 * sbh + 16 * sbh / t
    assert until_b(items, NORMS) == 4 * sbh
    if t == 1:
        total = ActivationBytes(until_b=s * b * (34 * h + 5 * a * s), until_w=32 * sbh)
        assert sum(items.values(), ActivationBytes()) == total


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_variants(sizes):
    sbh, square, t = sizes.s * sizes.b * sizes.h, sizes.a * sizes.s**2 * sizes.b, sizes.t
    split = vanilla_bytes(sizes, sequence_parallel=True)
    total = sum(split.values(), ActivationBytes())
    assert total == ActivationBytes((34 * sbh + 5 * square) // t, 32 * sbh // t)
    flash = vanilla_bytes(sizes, sequence_parallel=True, flash=True)
    assert until_b(flash) == 34 * sbh // t
    # Without dropout there are no masks (2 sbh), and of the squares only the softmax output.
    bare = vanilla_bytes(sizes, sequence_parallel=True, dropout=False)
    assert until_b(bare) == (32 * sbh + 2 * square) // t
    barest = sum(
        vanilla_bytes(sizes, sequence_parallel=True, flash=True, dropout=False).values(),
        ActivationBytes(),
    )
    assert barest.until_b == barest.until_w == total.until_w


def test_flops_are_what_a_layer_computes():
    """The products of a layer as written, its input gradient and its weights' gradients."""
    sizes = VanillaSizes(s=6, b=5, h=8, a=2)
    s, b, h, a = sizes.s, sizes.b, sizes.h, sizes.a

    def layer(weights, x):
        qkv, out, up, down = weights
        q, k, v = jnp.split((x @ qkv).reshape(b, s, 3 * a, h // a), 3, axis=2)
        scores = jax.nn.softmax(jnp.einsum("bqad,bkad->baqk", q, k))
        x = x + jnp.einsum("baqk,bkad->bqad", scores, v).reshape(b, s, h) @ out
        return x + jax.nn.gelu(x @ up) @ down

    shapes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    weights = [jnp.zeros(shape) for shape in shapes]
    x = jnp.zeros((b, s, h))
    total = sum(vanilla_flops(sizes).values(), OpFlops())
    assert dot_flops(layer, weights, x) == total.F
    pulled = dot_flops(lambda w, x: jax.vjp(layer, w, x)[1](x), weights, x)
    assert pulled == total.F + total.B + total.W
    only_x = dot_flops(lambda w, x: jax.vjp(lambda x: layer(w, x), x)[1](x), weights, x)
    assert only_x == total.F + total.B


def test_devices_hold_equal_parts():
    with pytest.raises(ValueError, match="t=3 must divide h=8"):
        VanillaSizes(s=6, b=1, h=8, a=3, t=3)
