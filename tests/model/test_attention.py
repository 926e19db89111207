"""Attention of grouped heads: values, gradients and layout."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.model.attention.blocks import KeyBlock, QueryBlock
from jaxpipe.model.attention.causal import CausalAttention
from jaxpipe.model.attention.keys import Keys
from jaxpipe.model.attention.plain import causal_attention, grouped_attention
from jaxpipe.model.kernels.cudnn_attention import FusedBlocks

HEADS = [(4, 4), (4, 2), (6, 1)]


def arguments(heads, dtype, queries=10, keys=10):
    shapes = [(2, queries, heads[0], 8), (2, keys, heads[1], 8), (2, keys, heads[1], 8)]
    return [
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes)
    ]


def causal(length):
    return jnp.tri(length, dtype=bool)[None, None]


def reference(q, k, v, mask):
    """Reference attention, head by head, with keys and values repeated for every query head."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("blhk,bshk->bhls", q, k) / jnp.sqrt(q.shape[3]).astype(q.dtype)
    return jnp.einsum("bhls,bshk->blhk", jax.nn.softmax(scores, where=mask), v)


@partial(jax.jit, static_argnums=0)
def values_and_gradients(attention, given, *mask):
    def loss(given):
        mixed = attention(*given, *mask)
        weights = jnp.sin(jnp.arange(mixed.size, dtype=mixed.dtype)).reshape(mixed.shape)
        return jnp.sum(weights * mixed), mixed

    (_, mixed), gradients = jax.value_and_grad(loss, has_aux=True)(given)
    return [mixed, *gradients]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("keys", [10, 16])
def test_values_and_gradients_equal_a_plain_reference(heads, keys):
    """With a mask that lets some queries attend to later keys too."""
    with jax.enable_x64(True):
        mask = (jnp.arange(10)[:, None] * 2 >= jnp.arange(keys)[None])[None, None]
        given = arguments(heads, "float64", keys=keys)
        found = values_and_gradients(grouped_attention, given, mask)
        equal(found, values_and_gradients(reference, given, mask))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [10, 256, 257])
def test_blocks_of_queries_are_causal_attention(heads, length):
    """One and two blocks, and a length that cannot be divided into blocks."""
    with jax.enable_x64(True):
        given = arguments(heads, "float64", length, length)
        found = values_and_gradients(causal_attention, given)
        equal(found, values_and_gradients(reference, given, causal(length)))


@pytest.mark.parametrize("length", [10, 256])
@pytest.mark.parametrize("window", [1, 3, 129, 300])
def test_a_window_is_of_so_many_last_tokens(length, window):
    """As jax counts the tokens for its fused kernel too: those to the left, and the query's own."""

    def library(q, k, v):
        left = (window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=left)

    with jax.enable_x64(True):
        given = arguments((4, 2), "float64", length, length)
        mask = causal(length) & ~jnp.tri(length, k=-window, dtype=bool)[None, None]
        assert mask.sum(-1).max() == min(window, length)
        wanted = values_and_gradients(reference, given, mask)
        equal(values_and_gradients(partial(causal_attention, window=window), given), wanted)
    narrow = [a.astype("float32") for a in given]
    found, want = (
        values_and_gradients(way, narrow)[0]
        for way in (library, partial(causal_attention, window=window))
    )
    assert jnp.abs(found - want).max() <= 1e-6


@pytest.mark.parametrize("window", [0, 3])
def test_the_fused_kernel_is_told_the_window(window, monkeypatch):
    """Only tracing: the checks for a GPU and its library are disabled."""
    fused = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{fused}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{fused}.check_compute_capability", lambda _: True)
    shape = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")
    attend = CausalAttention(kernel="cudnn", window=window)
    text = str(jax.make_jaxpr(lambda q, k, v: attend(q, Keys((k, v)))[0])(shape, shape, shape))
    assert f"sliding_window_length={window or None}\n" in text
    assert "mask_type=MaskType.CAUSAL" in text


@pytest.mark.parametrize("window", [0, 3])
def test_so_is_that_of_wide_heads(window):
    """Only lowering, which needs no GPU, with heads as wide as those of DeepSeek."""
    shape = jax.ShapeDtypeStruct((2, 128, 4, 192), "bfloat16")
    attend = CausalAttention(kernel="cudnn", window=window)
    run = jax.jit(lambda q, k, v: attend(q, Keys((k, v)))[0])
    text = run.trace(shape, shape, shape).lower(lowering_platforms=("cuda",)).as_text()
    assert f"sliding_window_length\\22: {window}" in text
    assert "mask_type\\22: \\22CAUSAL\\22" in text


@pytest.mark.parametrize(("way", "mask"), [("causal", "CAUSAL"), ("attend_block", "NO_MASK")])
def test_blocks_of_a_ring_become_calls_of_the_fused_kernel(way, mask):
    """Only lowering, which needs no GPU."""
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16")
    run = lambda q, k, v: getattr(FusedBlocks(), way)(QueryBlock(q, None), KeyBlock(k, v, None))  # noqa: E731
    text = jax.jit(run).trace(shape, shape, shape).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert f"mask_type\\22: \\22{mask}\\22" in text
    wide = jax.ShapeDtypeStruct((1, 128, 2, 320), "bfloat16")
    with pytest.raises(ValueError, match="320"):
        jax.jit(run).trace(wide, wide, wide).lower(lowering_platforms=("cuda",))


def equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype == "float64"
        assert jnp.abs(a - b).max() <= 1e-13 * jnp.abs(b).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_wide_scores(dtype):
    """Within two roundings of the same operands in float32, for scores that need more digits."""
    q, *given = arguments((4, 2), dtype)
    given = [8 * q, *given]
    mixed = causal_attention(*given)
    wide = reference(*(a.astype(jnp.float32) for a in given), causal(10))
    assert mixed.dtype == dtype
    assert jnp.abs(mixed - wide).max() <= 2 * jnp.finfo(dtype).eps * jnp.abs(wide).max()


@pytest.mark.parametrize("length", [10, 256])
def test_no_score_is_moved(length):
    """The compiled gradient neither copies nor transposes scores, as JAX's own attention does."""

    def library(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    given = arguments((4, 2), "float32", length, length)

    def moves(attention):
        """Return how often an array larger than q is copied or transposed."""
        gradient = jax.grad(lambda given: jnp.sum(attention(*given) ** 2))
        text = jax.jit(gradient).lower(given).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        return sum(prod(map(int, shape.split(","))) > given[0].size for shape in shapes)

    assert moves(causal_attention) == 0
    assert moves(library) > 0
