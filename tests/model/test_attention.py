"""Attention of grouped heads: values, gradients and layout."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.model.attention import grouped_attention

HEADS = [(4, 4), (4, 2), (6, 1)]


def arguments(heads, dtype, keys=10):
    shapes = [(2, 10, heads[0], 8), (2, keys, heads[1], 8), (2, keys, heads[1], 8)]
    return [
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes)
    ]


def twin(q, k, v, mask):
    """Head by head, every one with keys and values of its own."""
    if mask is None:
        mask = jnp.tri(q.shape[1], dtype=bool)[None, None]
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("blhk,bshk->bhls", q, k) / jnp.sqrt(q.shape[3]).astype(q.dtype)
    return jnp.einsum("bhls,bshk->blhk", jax.nn.softmax(scores, where=mask), v)


def values_and_gradients(attention, given, mask):
    def loss(given):
        mixed = attention(*given, mask)
        weights = jnp.sin(jnp.arange(mixed.size, dtype=mixed.dtype)).reshape(mixed.shape)
        return jnp.sum(weights * mixed), mixed

    (_, mixed), gradients = jax.value_and_grad(loss, has_aux=True)(given)
    return [mixed, *gradients]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("keys", [10, 16])
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-13), ("float32", 1e-6)])
def test_values_and_gradients_equal_a_plain_twin(heads, keys, dtype, within):
    """Causal over its own tokens, and by a mask that lets some queries see later keys too."""
    with jax.enable_x64(True):
        mask = None
        if keys > 10:
            mask = (jnp.arange(10)[:, None] * 2 >= jnp.arange(keys)[None])[None, None]
        given = arguments(heads, dtype, keys)
        found = values_and_gradients(grouped_attention, given, mask)
        for a, b in zip(found, values_and_gradients(twin, given, mask)):
            assert a.dtype == b.dtype == dtype
            assert jnp.abs(a - b).max() <= within * jnp.abs(b).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_wide_scores(dtype):
    """Within two roundings of the same operands in float32, with scores that need more digits."""
    q, *given = arguments((4, 2), dtype)
    given = [8 * q, *given]
    mixed = grouped_attention(*given, None)
    wide = twin(*(a.astype(jnp.float32) for a in given), None)
    assert mixed.dtype == dtype
    assert jnp.abs(mixed - wide).max() <= 2 * jnp.finfo(dtype).eps * jnp.abs(wide).max()


def test_no_score_is_moved():
    """Neither copied nor transposed by the compiled gradient, as those of JAX's own form are."""

    def library(q, k, v, _):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    def moves(attention):
        given = arguments((4, 2), "float32")
        gradient = jax.grad(lambda given: jnp.sum(attention(*given, None) ** 2))
        text = jax.jit(gradient).lower(given).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        sizes = [len([n for n in shape.split(",") if n == "10"]) for shape in shapes]
        return sum(size == 2 for size in sizes)

    assert moves(grouped_attention) == 0
    assert moves(library) > 0
