"""Hyper-connections against their formulas in NumPy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.layers.hyper_connection import (
    HyperConnection,
    HyperHead,
    normalise_rows_and_columns,
    plain_residual,
)
from jaxpipe.model.layers.parts import init_from

N, D = 3, 4
CONFIG = SimpleNamespace(d_model=D, norm_eps=1e-6, hc_mult=N, hc_sinkhorn_iters=30, hc_eps=1e-9)


def drawn(module):
    """Set every parameter of a module to random float64 values."""
    rng = np.random.default_rng(0)
    for name in ("weights", "base", "scale"):
        shape = getattr(module, name).shape
        setattr(module, name, nnx.Param(jnp.asarray(rng.standard_normal(shape))))
    return module


def products(module, x):
    """Return the logits before scale and base, `[B, L, X]`."""
    flat = np.asarray(x).reshape(*x.shape[:2], -1)
    normed = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    return normed @ np.asarray(module.weights[...])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def stream():
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, N, D)))


def test_rows_and_columns_of_the_mixing_matrix_add_up_to_one():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, N, N)))
        mix = np.asarray(normalise_rows_and_columns(logits, CONFIG))
    np.testing.assert_allclose(mix.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(mix.sum(-2), 1, atol=1e-8)
    assert (mix > 0).all()
    assert not np.allclose(mix, np.swapaxes(mix, -1, -2), atol=1e-2)


def test_a_sublayer_reads_a_weighted_sum_and_adds_to_mixed_copies():
    with jax.enable_x64(True):
        module = drawn(HyperConnection("own", CONFIG, init_from(jax.random.key(0)), ParamSpec()))
        x = stream()
        read, add = module(x)
        y = jnp.asarray(np.random.default_rng(3).standard_normal((2, 5, D)))
        logits, base = products(module, x), np.asarray(module.base[...])
        scales = np.repeat(np.asarray(module.scale[...]), [N, N, N * N])
        made = logits * scales + base
        weights = sigmoid(made[..., :N]) + CONFIG.hc_eps
        np.testing.assert_allclose(read, (weights[..., None] * x).sum(2), rtol=1e-12)
        mix = normalise_rows_and_columns(made[..., 2 * N :].reshape(2, 5, N, N), CONFIG)
        want = np.empty(x.shape)
        for copy in range(N):  # column by column: the matrix is not symmetric
            want[:, :, copy] = 2 * sigmoid(made[..., N + copy])[..., None] * y
            for source in range(N):
                want[:, :, copy] += mix[..., source, copy][..., None] * x[:, :, source]
        np.testing.assert_allclose(add(y), want, rtol=1e-12)


def test_the_head_reads_a_weighted_sum():
    with jax.enable_x64(True):
        module, x = drawn(HyperHead(CONFIG, init_from(jax.random.key(0)), ParamSpec())), stream()
        made = products(module, x) * float(module.scale[0]) + np.asarray(module.base[...])
        weights = sigmoid(made) + CONFIG.hc_eps
        np.testing.assert_allclose(module(x), (weights[..., None] * x).sum(2), rtol=1e-12)


def test_a_plain_residual_is_a_sum():
    x = jnp.arange(4.0)
    read, add = plain_residual(x)
    np.testing.assert_array_equal(read, x)
    np.testing.assert_array_equal(add(2 * x), 3 * x)
