"""The layers of a Llama-style decoder: plain single-device maths in Flax NNX.

Shapes: B examples, L tokens, D model, H query heads, G key/value heads, K head dim, F mlp hidden.
Parameters may be stored in any dtype; a layer computes in the dtype of its input, norms, rotary
angles and the attention's softmax in float32 (or wider, if the input is).
"""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.config import ModelConfig

Init = Callable[[str, tuple[int, ...], float], nnx.Param]  # (name, shape, standard deviation)


def init_from(key: jax.Array) -> Init:
    """Normal initial values that depend on the key and the parameter's name alone."""

    def init(name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return nnx.Param(std * jax.random.normal(own, shape, jnp.float32))

    return init


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x [..., size]`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def rotary(x_BLHK: jax.Array, positions_BL: jax.Array, theta: float) -> jax.Array:
    """Rotate the halves of each head by position (Su et al. 2021; rotate-half layout).

    Pair (i, i + K/2) turns by position * theta^(-2i/K).
    """
    half = x_BLHK.shape[-1] // 2
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    frequency_K = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle_BLK = positions_BL[..., None].astype(wide) * frequency_K[None, None]
    cos, sin = jnp.cos(angle_BLK)[:, :, None], jnp.sin(angle_BLK)[:, :, None]
    first, second = jnp.split(x_BLHK.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHK.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions and optional norms of q and k."""

    def __init__(self, config: ModelConfig, init: Init):
        d, k = config.d_model, config.head_size
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.wq = init("attn/wq", (d, config.n_heads * k), 0.02)
        self.wk = init("attn/wk", (d, config.n_kv_heads * k), 0.02)
        self.wv = init("attn/wv", (d, config.n_kv_heads * k), 0.02)
        self.wo = init("attn/wo", (config.n_heads * k, d), out_std)
        if config.qk_norm:
            self.q_norm = RMSNorm(k, config.norm_eps)
            self.k_norm = RMSNorm(k, config.norm_eps)
        self.config = config

    def __call__(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Mix tokens: `[B, L, D] -> [B, L, D]`."""
        config = self.config

        def heads(weight: nnx.Param, count: int) -> jax.Array:
            projected = x_BLD @ weight[...].astype(x_BLD.dtype)
            return projected.reshape(*x_BLD.shape[:2], count, config.head_size)

        q_BLHK = heads(self.wq, config.n_heads)
        k_BLGK = heads(self.wk, config.n_kv_heads)
        v_BLGK = heads(self.wv, config.n_kv_heads)
        if config.qk_norm:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK = rotary(q_BLHK, positions_BL, config.rope_theta)
        k_BLGK = rotary(k_BLGK, positions_BL, config.rope_theta)
        mixed_BLHK = jax.nn.dot_product_attention(
            q_BLHK, k_BLGK, v_BLGK, is_causal=True, implementation=config.attention
        )
        return mixed_BLHK.reshape(*x_BLD.shape[:2], -1) @ self.wo[...].astype(x_BLD.dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, init: Init):
        d, f = config.d_model, config.d_ff
        self.w_gate = init("mlp/w_gate", (d, f), 0.02)
        self.w_up = init("mlp/w_up", (d, f), 0.02)
        self.w_down = init("mlp/w_down", (f, d), 0.02 / (2 * config.n_layers) ** 0.5)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Transform each token: `[B, L, D] -> [B, L, D]`."""
        gate, up, down = (w[...].astype(x_BLD.dtype) for w in (self.w_gate, self.w_up, self.w_down))
        return (jax.nn.silu(x_BLD @ gate) * (x_BLD @ up)) @ down


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, init: Init):
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config, init)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config, init)

    def __call__(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """`[B, L, D] -> [B, L, D]`."""
        x_BLD = x_BLD + self.attn(self.attn_norm(x_BLD), positions_BL)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Ends(nnx.Module):
    """What the model has once: the embedding before the layers, norm and head after them."""

    def __init__(self, config: ModelConfig, init: Init):
        self.embed = init("embed", (config.vocab_size, config.d_model), 0.02)
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = init("head", (config.d_model, config.vocab_size), 0.02)

    def enter(self, tokens_BL: jax.Array) -> jax.Array:
        """Embed tokens: `[B, L] -> [B, L, D]`."""
        return self.embed[...][tokens_BL]

    def leave(self, x_BLD: jax.Array) -> jax.Array:
        """Logits: `[B, L, D] -> [B, L, V]`."""
        return self.final_norm(x_BLD) @ self.head[...].astype(x_BLD.dtype)
