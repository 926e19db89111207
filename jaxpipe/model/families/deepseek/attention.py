"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

Shapes: B examples, L tokens, S keys (L, or those of all devices and earlier slices), D model, H
heads, of which a device has its shard, K the width of a query or key head, of which N dims have no
position and P are rotated, V the width of a value, R that of the latent of keys and values.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.layers.parts import PLAIN_DOT, Dot, Init, LayerInputs, RMSNorm, scale
from jaxpipe.model.layers.rope.rotate import rotary
from jaxpipe.model.options import LayerParts

# In DeepSeek's code and in transformers the norms of the latents have this epsilon, whatever
# `rms_norm_eps` is.
_LATENT_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values are made of one narrow latent per token.

    The rotated part of the keys is made of the stream and is the same for all heads. Devices that
    share the layer have complete heads; each makes the latents itself, of replicated weights, whose
    gradients from its own heads are partial.

    Devices that share a sequence exchange what keys and values are made of, and slices cache it: R
    + P values per token in place of H (K + V). Keys and values of all tokens so far are made again
    in every slice, and in its B, for one block of them at a time where attention runs in blocks; a
    slice of one token, as in generation, makes none (`absorb`). Devices that exchange heads pass
    on keys and values.
    """

    NAME = "attn"

    def __init__(self, config: DeepseekConfig, parts: LayerParts, init: Init):
        d, heads, rank = config.d_model, config.n_heads, config.kv_lora_rank
        whole = parts.own(differs=parts.devices.size > 1)
        queries, out_std = heads * config.head_size, 0.02 / (2 * config.n_layers) ** 0.5
        if config.q_lora_rank:
            self.wq_a = init("attn/wq_a", (d, config.q_lora_rank), 0.02, whole)
            self.q_norm = RMSNorm("attn/q_norm", config.q_lora_rank, _LATENT_EPS, init, whole)
            self.wq_b = init("attn/wq_b", (config.q_lora_rank, queries), 0.02, parts.cut(1))
        else:
            self.wq = init("attn/wq", (d, queries), 0.02, parts.cut(1))
        self.wkv_a = init("attn/wkv_a", (d, rank + config.qk_rope_head_dim), 0.02, whole)
        self.kv_norm = RMSNorm("attn/kv_norm", rank, _LATENT_EPS, init, whole)
        keys_and_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.wkv_b = init("attn/wkv_b", (rank, keys_and_values), 0.02, parts.cut(1))
        self.wo = init("attn/wo", (heads * config.v_head_dim, d), out_std, parts.cut(0))
        self.attend = parts.attention(config)
        self.config, self.devices = config, parts.devices

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; the positions are those of all L tokens."""
        x_BLD = self.devices.enter(x_BLD)
        q_BLHK, parts, _ = self.operands(x_BLD, positions_BL, given.dot)
        latents = Keys(parts, partial(self._expand, given.dot))
        if self._absorbs(given, q_BLHK.shape[1]):
            keys = latents._replace(make=shared_by_heads)
            weights_RHX, nope = self.expansions(q_BLHK), self.config.qk_nope_head_dim
            mixed_BLHR, cache = self.attend(absorb(nope, q_BLHK, weights_RHX), keys, given)
            mixed_BLHV = to_values(nope, mixed_BLHR, weights_RHX)
        else:
            keys = latents._replace(by_block=given.dot.adds_up)
            mixed_BLHV, cache = self.attend(q_BLHK, keys, given)
        return self.output(mixed_BLHV, given.dot), cache

    def operands(
        self, x_BLD: jax.Array, positions_BL: jax.Array, dot: Dot
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array | None]:
        """Queries `[B, L, H, K]`; latents and rotated keys, `[B, L, 1, R]` and `[B, L, 1, P]`.

        The third is the latent from which queries are computed, `[B, L, R]`; None without one.
        """
        config = self.config
        query_BLR, q_BLX, latent_BLX = self._project(x_BLD, dot)
        q_BLHK = self._heads(q_BLX, config.head_size)
        latent_BLR, key_BLP = jnp.split(latent_BLX, [config.kv_lora_rank], axis=-1)
        latent_BL1R = self.kv_norm(latent_BLR)[:, :, None]
        key_BL1P = key_BLP[:, :, None]
        if config.has_positions:
            key_BL1P = rotary(key_BL1P, positions_BL, config)
            q_BLHK = self._rotated_queries(q_BLHK, positions_BL)
        return q_BLHK, (latent_BL1R, key_BL1P), query_BLR

    def output(self, mixed_BLHV: jax.Array, dot: Dot) -> jax.Array:
        """What attention adds to the stream, `[B, L, D]`."""
        (made_BLD,) = dot(mixed_BLHV.reshape(*mixed_BLHV.shape[:2], -1), wo=self.wo[...])
        return self.devices.leave(made_BLD)

    def _project(self, x_BLD: jax.Array, dot: Dot) -> tuple[jax.Array | None, jax.Array, jax.Array]:
        """Latent of queries, queries of all heads, latent of keys and values with rotated keys."""
        wkv_a = self.wkv_a[...]
        if not self.config.q_lora_rank:
            return None, *dot(x_BLD, wq=self.wq[...], wkv_a=wkv_a)
        query_BLR, latent_BLX = dot(x_BLD, wq_a=self.wq_a[...], wkv_a=wkv_a)
        query_BLR = self.q_norm(query_BLR)
        (q_BLX,) = dot(query_BLR, wq_b=self.wq_b[...])
        return query_BLR, q_BLX, latent_BLX

    def _expand(
        self, dot: Dot, latent_BS1R: jax.Array, key_BS1P: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values of all heads, `[B, S, H, K]` and `[B, S, H, V]`."""
        nope, config = self.config.qk_nope_head_dim, self.config
        (kv_BSX,) = dot(latent_BS1R[:, :, 0], wkv_b=self.wkv_b[...])
        key_BSHN, v_BSHV = jnp.split(self._heads(kv_BSX, nope + config.v_head_dim), [nope], axis=-1)
        key_BSHP = jnp.broadcast_to(key_BS1P, (*key_BSHN.shape[:3], config.qk_rope_head_dim))
        return _joined(key_BSHN, key_BSHP), v_BSHV

    def _absorbs(self, given: LayerInputs, length: int) -> bool:
        """Whether queries read latents: of one token, and where the kernel has heads so wide."""
        one = given.cache is not None and length == 1
        return one and given.dot == PLAIN_DOT and self.config.attention == "xla"

    def expansions(self, x: jax.Array) -> jax.Array:
        """The weights that make keys and values of latents, `[R, H, N + V]` in x's dtype."""
        width = self.config.qk_nope_head_dim + self.config.v_head_dim
        wkv_b_RX = self.wkv_b[...].astype(x.dtype)
        return wkv_b_RX.reshape(len(wkv_b_RX), -1, width)

    def _rotated_queries(self, q_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Queries with rotated part, times `score_scale`, which attention's kernels do not have."""
        config = self.config
        query_BLHN, query_BLHP = jnp.split(q_BLHK, [config.qk_nope_head_dim], axis=-1)
        query_BLHP = rotary(query_BLHP, positions_BL, config)
        return scale(_joined(query_BLHN, query_BLHP), config.score_scale)

    def _heads(self, x_BLX: jax.Array, width: int) -> jax.Array:
        return x_BLX.reshape(*x_BLX.shape[:2], -1, width)


def absorb(nope: int, q_BLHK: jax.Array, weights_RHX: jax.Array) -> jax.Array:
    """Queries whose products with latents and rotated keys are those with expanded keys.

    Every head then reads the same R + P values of a token as its key, and R of them as its value
    (the paper, section 2.1.2). Scores are divided by the square root of this width. `nope` is N.
    """
    query_BLHN, query_BLHP = jnp.split(q_BLHK, [nope], axis=-1)
    to_keys_RHN = weights_RHX[..., :nope]
    query_BLHX = _joined(jnp.einsum("blhn,rhn->blhr", query_BLHN, to_keys_RHN), query_BLHP)
    return scale(query_BLHX, (query_BLHX.shape[-1] / q_BLHK.shape[-1]) ** 0.5)


def to_values(nope: int, mixed_BLHR: jax.Array, weights_RHX: jax.Array) -> jax.Array:
    """Values of mixed latents, `[B, L, H, V]`."""
    return jnp.einsum("blhr,rhv->blhv", mixed_BLHR, weights_RHX[..., nope:])


def shared_by_heads(latent_BS1R: jax.Array, key_BS1P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Key and value of all heads, as absorbed queries read them."""
    return _joined(latent_BS1R, key_BS1P), latent_BS1R


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-1)
