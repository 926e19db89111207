"""Residual connections of a layer: plain, or manifold-constrained hyper-connections (mHC).

With hyper-connections the stream between layers has N copies of a token, which every sublayer reads
as one weighted sum and to which it adds its output with a weight for each; a doubly stochastic
matrix mixes the copies. All weights depend on the token.

Shapes: B examples, L tokens, N copies, D model. Weights are computed in float32, or wider if the
stream is.

Source: Xie et al. 2026, "mHC: Manifold-constrained hyper-connections", in the form of transformers'
`DeepseekV4HyperConnection`.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.layers.parts import Init, broadcast_last

# Adds a sublayer's output `[B, L, D]` to the stream that the sublayer read.
Add = Callable[[jax.Array], jax.Array]
# What a sublayer reads of the stream, and the function that adds its output.
Residual = Callable[[jax.Array], tuple[jax.Array, Add]]


class HyperConnectionSizes(Protocol):
    """The settings that hyper-connections read.

    Attributes:
      hc_mult: number of copies N.
      hc_sinkhorn_iters: normalisations of rows and columns of the mixing matrix.
      hc_eps: what is added to sigmoids, shares and sums, so that nothing is divided by 0.
    """

    d_model: int
    norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float


def plain_residual(x_BLD: jax.Array) -> tuple[jax.Array, Add]:
    """Return what a sublayer reads, and the function that adds its output: x + y."""
    return x_BLD, lambda y_BLD: x_BLD + y_BLD


class HyperConnection(nnx.Module):
    """The weights with which one sublayer reads the copies of the stream and adds to them."""

    def __init__(self, name: str, config: HyperConnectionSizes, init: Init, leaf: ParamSpec):
        n = config.hc_mult
        self.weights = init(f"{name}/weights", (n * config.d_model, (2 + n) * n), 0.02, leaf)
        self.base = init(f"{name}/base", ((2 + n) * n,), 0.0, leaf)
        self.scale = init(f"{name}/scale", (3,), None, leaf)
        self.config = config

    def __call__(self, x_BLND: jax.Array) -> tuple[jax.Array, Add]:
        """Return what the sublayer reads, `[B, L, D]`, and the function that adds its output."""
        config, n = self.config, self.config.hc_mult
        logits_BLX = _logits(x_BLND, self.weights[...], config.norm_eps)
        scales_3 = self.scale[...].astype(logits_BLX.dtype)[:, None, None, None]
        read_BLN, add_BLN, mix_BLX = (
            scale * logits + broadcast_last(base, logits)
            for scale, logits, base in zip(
                scales_3,
                jnp.split(logits_BLX, [n, 2 * n], axis=-1),
                jnp.split(self.base[...], [n, 2 * n]),
                strict=True,
            )
        )
        add_BLN = (2 * jax.nn.sigmoid(add_BLN)).astype(x_BLND.dtype)
        mix_BLNN = mix_BLX.reshape(*mix_BLX.shape[:-1], n, n)
        mix_BLNN = normalise_rows_and_columns(mix_BLNN, config).astype(x_BLND.dtype)

        def add(y_BLD: jax.Array) -> jax.Array:
            mixed_BLND = jnp.einsum("blij,blid->bljd", mix_BLNN, x_BLND)
            return add_BLN[..., None] * y_BLD[:, :, None] + mixed_BLND

        return _collapse(jax.nn.sigmoid(read_BLN) + config.hc_eps, x_BLND), add


class HyperHead(nnx.Module):
    """The weighted sum of the copies that the final norm reads."""

    def __init__(self, config: HyperConnectionSizes, init: Init, leaf: ParamSpec):
        n = config.hc_mult
        self.weights = init("hyper/weights", (n * config.d_model, n), 0.02, leaf)
        self.base = init("hyper/base", (n,), 0.0, leaf)
        self.scale = init("hyper/scale", (1,), None, leaf)
        self.config = config

    def __call__(self, x_BLND: jax.Array) -> jax.Array:
        """`[B, L, N, D] -> [B, L, D]`."""
        logits_BLN = _logits(x_BLND, self.weights[...], self.config.norm_eps)
        logits_BLN *= broadcast_last(self.scale[...], logits_BLN)
        logits_BLN += broadcast_last(self.base[...], logits_BLN)
        return _collapse(jax.nn.sigmoid(logits_BLN) + self.config.hc_eps, x_BLND)


def normalise_rows_and_columns(logits_BLNN: jax.Array, config: HyperConnectionSizes) -> jax.Array:
    """A matrix whose rows and columns have sums near 1 (Sinkhorn and Knopp 1967).

    It starts as the softmax of each row; rows and columns are normalised in turn, columns last.
    """
    eps = config.hc_eps
    mix_BLNN = jax.nn.softmax(logits_BLNN, axis=-1) + eps
    for iteration in range(config.hc_sinkhorn_iters):
        if iteration:
            mix_BLNN = mix_BLNN / (mix_BLNN.sum(-1, keepdims=True) + eps)
        mix_BLNN = mix_BLNN / (mix_BLNN.sum(-2, keepdims=True) + eps)
    return mix_BLNN


def _logits(x_BLND: jax.Array, weights: jax.Array, eps: float) -> jax.Array:
    """Products of all copies of a token, divided by their root mean square, with the weights."""
    wide = jnp.promote_types(x_BLND.dtype, jnp.float32)
    x_BLX = x_BLND.reshape(*x_BLND.shape[:2], -1).astype(wide)
    normed_BLX = x_BLX * jax.lax.rsqrt((x_BLX * x_BLX).mean(-1, keepdims=True) + eps)
    return normed_BLX @ weights.astype(wide)


def _collapse(weights_BLN: jax.Array, x_BLND: jax.Array) -> jax.Array:
    return (weights_BLN[..., None] * x_BLND).sum(2).astype(x_BLND.dtype)
