"""Mamba-2 as a layer's token mixer (Dao and Gu 2024, arXiv 2405.21060, section 7).

Shapes: B examples, L tokens, D model, T taps of a convolution, G groups of heads, H heads, P the
width of a head, N that of its state. Where devices share a layer, G and H count this device's
shard. With context parallelism L is this device's sequence shard; where devices exchange heads the
recurrence runs over all tokens for a share of the groups.
"""

from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.layers.parts import Init, LayerInputs, broadcast_last
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.chunks import Tokens
from jaxpipe.model.recurrent.gated_delta import draw_decay_bias, draw_log_decay, draw_taps
from jaxpipe.model.recurrent.heads import (
    convolve_heads,
    shares_of_heads,
    to_heads,
    weights_of_heads,
)
from jaxpipe.model.recurrent.shards import recurrence_of_shards


class Sizes(Protocol):
    """The settings that a Mamba-2 mixer reads."""

    d_model: int
    n_layers: int
    norm_eps: float
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    mamba_state: int
    mamba_taps: int
    mamba_chunk: int
    mamba_step_min: float


class Mamba2(nnx.Module):
    """Inputs, keys B and queries C of short convolutions, a recurrence, and a gated norm.

    A head's state `[N, P]` takes up each token's input times its step, at the key of the head's
    group, and decays with the step. Source: transformers' `NemotronHMamba2Mixer`. Devices that
    share the layer have complete groups, or shares of the heads of the only group, whose keys and
    queries each of them computes.
    """

    NAME = "mamba"
    PRODUCTS: ClassVar[tuple[str, ...]] = ("wz", "wx", "wb", "wc", "wo")  # passed to `dot`

    def __init__(self, config: Sizes, parts: LayerParts, init: Init):
        d, heads = config.d_model, config.mamba_heads
        inner, states = heads * config.mamba_head_dim, config.mamba_groups * config.mamba_state
        columns, vector = parts.cut(1), parts.cut(0)
        self.own_groups = config.mamba_groups % parts.devices.size == 0
        of_groups = (vector, columns) if self.own_groups else (parts.own(differs=True),) * 2
        self.wz = init("mamba/wz", (d, inner), 0.02, columns)
        self.wx = init("mamba/wx", (d, inner), 0.02, columns)
        self.wb = init("mamba/wb", (d, states), 0.02, of_groups[1])
        self.wc = init("mamba/wc", (d, states), 0.02, of_groups[1])
        self.step = init("mamba/step", (d, heads), 0.02, columns)
        self.step_bias = init("mamba/step_bias", (heads,), draw_decay_bias, vector)
        self.log_decay = init("mamba/log_decay", (heads,), draw_log_decay, vector)
        self.skip = init("mamba/skip", (heads,), None, vector)
        for name, width, (of_bias, of_taps) in (
            ("x", inner, (vector, columns)), ("b", states, of_groups), ("c", states, of_groups)
        ):  # fmt: skip
            taps = init(f"mamba/conv_{name}", (config.mamba_taps, width), draw_taps, of_taps)
            setattr(self, f"conv_{name}", taps)
            bias = init(f"mamba/conv_{name}_bias", (width,), 0.0, of_bias)
            setattr(self, f"conv_{name}_bias", bias)
        self.norm_scale = init("mamba/norm_scale", (inner,), None, vector)
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.wo = init("mamba/wo", (inner, d), out_std, parts.cut(0))
        self.config, self.devices, self.sequence = config, parts.devices, parts.sharing.sequence

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; with slices also the state after the slice."""
        x_BLD, dot = self.devices.enter(x_BLD), given.dot
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        z_BLX, *products = dot(
            x_BLD, wz=self.wz[...], wx=self.wx[...], wb=self.wb[...], wc=self.wc[...]
        )
        step_BLH = (x_BLD @ self.step[...].astype(x_BLD.dtype)).astype(wide)
        step_BLH = jax.nn.softplus(step_BLH + broadcast_last(self.step_bias[...], step_BLH))
        step_BLH = jnp.maximum(step_BLH, self.config.mamba_step_min)
        mixed_BLHP, cache = self._mix(tuple(products), step_BLH, given)
        gated_BLX = mixed_BLHP.reshape(z_BLX.shape) * jax.nn.silu(z_BLX.astype(wide))
        (made_BLD,) = dot(self._norm(gated_BLX).astype(x_BLD.dtype), wo=self.wo[...])
        return self.devices.leave(made_BLD), cache

    def _mix(
        self, products: tuple[jax.Array, ...], step_BLH: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Run convolutions and recurrence over a slice's tokens, `[B, L, H, P]`; with its state."""
        config, sequence, documents = self.config, self.sequence, given.documents
        positions_BL = None if documents is None else sequence.gather_group(documents.positions)
        shares = shares_of_heads(self.devices, sequence)
        state = given.cache.parts if given.cache else self.empty_state(config, products[0], shares)
        widths = config.mamba_head_dim, config.mamba_state, config.mamba_state
        convolved, after = [], []
        for name, x_BLX, width, before in zip("xbc", products, widths, state):
            taps_TX = getattr(self, f"conv_{name}")[...]
            bias_X = getattr(self, f"conv_{name}_bias")[...]
            x_BLHP, last = convolve_heads(
                sequence, x_BLX, taps_TX, width, before, positions_BL, bias_X
            )
            convolved.append(x_BLHP)
            after.append(last)
        x_BLHP, b_BLGN, c_BLGN = convolved
        x_BLHP = x_BLHP.astype(step_BLH.dtype)
        speed_BLH = jnp.exp(broadcast_last(self.log_decay[...], step_BLH))
        decay_BLH = to_heads(sequence, -speed_BLH * step_BLH, 1)
        step_BLH = to_heads(sequence, step_BLH, 1)
        by_group = *b_BLGN.shape[:3], -1  # heads of a group follow each other
        tokens = Tokens(
            c_BLGN, b_BLGN,
            (step_BLH[..., None] * x_BLHP).reshape(*by_group, config.mamba_head_dim),
            decay_BLH.reshape(by_group),
            starts_BL=None if positions_BL is None else positions_BL == 0,
        )  # fmt: skip
        mixed_BLGRP, recurrent = recurrence_of_shards(
            sequence.after_exchange, tokens, state[-1], config.mamba_chunk
        )
        (skip_H,) = weights_of_heads(sequence, self.skip[...][None], 1)
        skipped_BLHP = broadcast_last(skip_H, step_BLH)[..., None] * x_BLHP
        cache = given.cache and given.cache._replace(parts=(*after, recurrent))
        return sequence.to_tokens(mixed_BLGRP.reshape(x_BLHP.shape) + skipped_BLHP), cache

    def _norm(self, x_BLX: jax.Array) -> jax.Array:
        """x over the root mean square of its group of heads, times a scale."""
        groups = self.config.mamba_groups // self.devices.size if self.own_groups else 1
        x_BLGX = x_BLX.reshape(*x_BLX.shape[:2], groups, -1)
        square = jnp.mean(x_BLGX * x_BLGX, axis=-1, keepdims=True)
        if not self.own_groups:
            square = self.devices.joint_sum(square) / self.devices.size
        normed_BLGX = x_BLGX * jax.lax.rsqrt(square + self.config.norm_eps)
        return normed_BLGX.reshape(x_BLX.shape) * broadcast_last(self.norm_scale[...], x_BLX)

    @staticmethod
    def empty_state(config: Sizes, x: jax.Array, shares: int) -> tuple[jax.Array, ...]:
        """The state before a sequence: last inputs of three convolutions, and the recurrence's.

        Args:
          config: sizes of the mixer.
          x: an array of the batch and the dtype, `[B, ...]`.
          shares: number of devices that share the groups, or the heads of the only one.
        """
        groups = max(config.mamba_groups // shares, 1)
        heads, keys = config.mamba_heads // shares // groups, config.mamba_state
        tails = groups * heads * config.mamba_head_dim, groups * keys, groups * keys
        state = len(x), groups, heads, keys, config.mamba_head_dim
        return (
            *(jnp.zeros((len(x), config.mamba_taps - 1, width), x.dtype) for width in tails),
            jnp.zeros(state, jnp.promote_types(x.dtype, jnp.float32)),
        )
