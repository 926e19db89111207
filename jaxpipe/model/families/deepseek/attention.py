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
    slice of one token, as in generation, makes none (`_absorb`). Devices that exchange heads pass
    on keys and values.
    """

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
        config, devices = self.config, self.devices
        x_BLD = devices.enter(x_BLD)
        q_BLX, latent_BLX = self._project(x_BLD, given.dot)
        q_BLHK = self._heads(q_BLX, config.head_size)
        latent_BLR, key_BLP = jnp.split(latent_BLX, [config.kv_lora_rank], axis=-1)
        latent_BL1R = self.kv_norm(latent_BLR)[:, :, None]
        key_BL1P = rotary(key_BLP[:, :, None], positions_BL, config)
        q_BLHK = self._rotated_queries(q_BLHK, positions_BL)
        latents = Keys((latent_BL1R, key_BL1P), partial(self._expand, given.dot))
        if self._absorbs(given, q_BLHK.shape[1]):
            keys = latents._replace(make=lambda latent, key: (_joined(latent, key), latent))
            mixed_BLHR, cache = self.attend(self._absorb(q_BLHK), keys, given)
            _, to_values_RHV = self._expansions(mixed_BLHR)
            mixed_BLHV = jnp.einsum("blhr,rhv->blhv", mixed_BLHR, to_values_RHV)
        else:
            keys = latents._replace(by_block=given.dot.adds_up)
            mixed_BLHV, cache = self.attend(q_BLHK, keys, given)
        mixed_BLX = mixed_BLHV.reshape(*x_BLD.shape[:2], -1)
        (made_BLD,) = given.dot(mixed_BLX, wo=self.wo[...])
        return devices.leave(made_BLD), cache

    def _project(self, x_BLD: jax.Array, dot: Dot) -> tuple[jax.Array, jax.Array]:
        """Queries of all heads, and the latent of keys and values beside the rotated keys."""
        wkv_a = self.wkv_a[...]
        if not self.config.q_lora_rank:
            return dot(x_BLD, wq=self.wq[...], wkv_a=wkv_a)
        query_BLR, latent_BLX = dot(x_BLD, wq_a=self.wq_a[...], wkv_a=wkv_a)
        (q_BLX,) = dot(self.q_norm(query_BLR), wq_b=self.wq_b[...])
        return q_BLX, latent_BLX

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

    def _absorb(self, q_BLHK: jax.Array) -> jax.Array:
        """Queries whose products with latents and rotated keys are those with expanded keys.

        Every head then reads the same R + P values of a token as its key, and R of them as its
        value (the paper, section 2.1.2). Scores are divided by the square root of this width.
        """
        query_BLHN, query_BLHP = jnp.split(q_BLHK, [self.config.qk_nope_head_dim], axis=-1)
        to_keys_RHN, _ = self._expansions(q_BLHK)
        query_BLHX = _joined(jnp.einsum("blhn,rhn->blhr", query_BLHN, to_keys_RHN), query_BLHP)
        return scale(query_BLHX, (query_BLHX.shape[-1] / q_BLHK.shape[-1]) ** 0.5)

    def _expansions(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights that make keys and values of latents, `[R, H, N]`, `[R, H, V]`, as x is."""
        nope, config = self.config.qk_nope_head_dim, self.config
        wkv_b_RX = self.wkv_b[...].astype(x.dtype)
        wkv_b_RHX = wkv_b_RX.reshape(len(wkv_b_RX), -1, nope + config.v_head_dim)
        return tuple(jnp.split(wkv_b_RHX, [nope], axis=-1))

    def _rotated_queries(self, q_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Queries with rotated part, times `score_scale`, which attention's kernels do not have."""
        config = self.config
        query_BLHN, query_BLHP = jnp.split(q_BLHK, [config.qk_nope_head_dim], axis=-1)
        query_BLHP = rotary(query_BLHP, positions_BL, config)
        return scale(_joined(query_BLHN, query_BLHP), config.score_scale)

    def _heads(self, x_BLX: jax.Array, width: int) -> jax.Array:
        return x_BLX.reshape(*x_BLX.shape[:2], -1, width)


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-1)
