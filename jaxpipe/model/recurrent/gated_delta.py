"""A gated delta network as a layer's token mixer (Yang et al. 2024, arXiv 2412.06464).

Shapes: B examples, L tokens, D model, T taps of a convolution, G key heads, H value heads, K and V
the widths of a key and of a value, X channels of all heads. Where devices share a layer, G and H
count this device's shard. With context parallelism L is this device's sequence shard. Where devices
exchange heads the recurrence runs over all tokens for a share of the heads; otherwise over the
shard, from the state that the shards before it leave.
"""

import math
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.layers.parts import Init, LayerInputs, RMSNorm, broadcast_last
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.chunks import Tokens
from jaxpipe.model.recurrent.heads import convolve_heads, shares_of_heads, to_heads
from jaxpipe.model.recurrent.shards import recurrence_of_shards


class Sizes(Protocol):
    """The settings that a gated delta network reads."""

    d_model: int
    n_layers: int
    norm_eps: float
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    delta_taps: int
    delta_chunk: int


class GatedDeltaNetwork(nnx.Module):
    """Queries, keys and values of short convolutions, the gated delta rule, and a gated norm.

    Source: transformers' `Qwen3NextGatedDeltaNet`. Each of a key head's value heads has a state of
    its own. Devices that share the layer have complete heads.
    """

    NAME = "delta"
    PRODUCTS: ClassVar[tuple[str, ...]] = ("wq", "wk", "wv", "wz", "wo")  # passed to `dot`

    def __init__(self, config: Sizes, parts: LayerParts, init: Init):
        d, heads = config.d_model, config.delta_value_heads
        keys, values = config.delta_key_heads * config.delta_key_dim, heads * config.delta_value_dim
        out_std, columns = 0.02 / (2 * config.n_layers) ** 0.5, parts.cut(1)
        self.wq = init("delta/wq", (d, keys), 0.02, columns)
        self.wk = init("delta/wk", (d, keys), 0.02, columns)
        self.wv = init("delta/wv", (d, values), 0.02, columns)
        self.rate = init("delta/rate", (d, heads), 0.02, columns)
        self.log_decay = init("delta/log_decay", (heads,), draw_log_decay, parts.cut(0))
        self.init_gates(config, parts, init)
        for name, width in ("conv_q", keys), ("conv_k", keys), ("conv_v", values):
            taps = init(f"delta/{name}", (config.delta_taps, width), draw_taps, columns)
            setattr(self, name, taps)
        norm = parts.own(differs=parts.devices.size > 1)
        self.norm = RMSNorm("delta/norm", config.delta_value_dim, config.norm_eps, init, norm)
        self.wo = init("delta/wo", (values, d), out_std, parts.cut(0))
        self.config, self.devices, self.sequence = config, parts.devices, parts.sharing.sequence

    def init_gates(self, config: Sizes, parts: LayerParts, init: Init) -> None:
        """Create the parameters of the decay of states, and of the gate on the output."""
        d, heads, columns = config.d_model, config.delta_value_heads, parts.cut(1)
        self.wz = init("delta/wz", (d, heads * config.delta_value_dim), 0.02, columns)
        self.decay = init("delta/decay", (d, heads), 0.02, columns)
        self.decay_bias = init("delta/decay_bias", (heads,), draw_decay_bias, parts.cut(0))

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; with slices also the state after the slice."""
        x_BLD, dot = self.devices.enter(x_BLD), given.dot
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        q_BLX, k_BLX, v_BLX, z_BLX = dot(
            x_BLD, wq=self.wq[...], wk=self.wk[...], wv=self.wv[...], wz=self.wz[...]
        )
        rate_BLH, decay_BLH = self.gates(x_BLD)
        mixed_BLHV, cache = self.mix((q_BLX, k_BLX, v_BLX), rate_BLH, decay_BLH, given)
        normed_BLHV = self.norm(mixed_BLHV).astype(wide)
        gate_BLHV = jax.nn.silu(z_BLX.astype(wide)).reshape(normed_BLHV.shape)
        gated_BLX = (normed_BLHV * gate_BLHV).astype(x_BLD.dtype).reshape(z_BLX.shape)
        (made_BLD,) = dot(gated_BLX, wo=self.wo[...])
        return self.devices.leave(made_BLD), cache

    def gates(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rate of each token's correction, and the logarithm of the decay before it."""
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        rate_BLH = (x_BLD @ self.rate[...].astype(x_BLD.dtype)).astype(wide)
        step_BLH = (x_BLD @ self.decay[...].astype(x_BLD.dtype)).astype(wide)
        step_BLH = jax.nn.softplus(step_BLH + broadcast_last(self.decay_bias[...], step_BLH))
        speed_BLH = jnp.exp(broadcast_last(self.log_decay[...], step_BLH))
        return jax.nn.sigmoid(rate_BLH), -speed_BLH * step_BLH

    def mix(
        self, products: tuple[jax.Array, ...], rate_BLH: jax.Array, decay_BLX: jax.Array,
        given: LayerInputs,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Run convolutions and recurrence over a slice's tokens, `[B, L, H, V]`; with its state.

        Args:
          products: queries, keys and values of all heads, `[B, L, X]` each.
          rate_BLH: the rate of each token's correction.
          decay_BLX: the logarithm of the decay before each token, `[B, L, H]`, or `[B, L, H K]`
            where every channel of a key has its own.
          given: the other arguments of the layer's call.
        """
        config, sequence, documents = self.config, self.sequence, given.documents
        positions_BL = None if documents is None else sequence.gather_group(documents.positions)
        shares = shares_of_heads(self.devices, sequence)
        state = given.cache.parts if given.cache else self.empty_state(config, products[0], shares)
        widths = config.delta_key_dim, config.delta_key_dim, config.delta_value_dim
        every_taps = self.conv_q[...], self.conv_k[...], self.conv_v[...]
        mixed, after = [], []
        for x_BLX, width, taps_TX, before in zip(products, widths, every_taps, state):
            x_BLHK, last = convolve_heads(sequence, x_BLX, taps_TX, width, before, positions_BL)
            mixed.append(x_BLHK)
            after.append(last)
        q_BLGK, k_BLGK, v_BLHV = mixed
        # Value heads of a key head follow each other.
        by_key = *q_BLGK.shape[:3], v_BLHV.shape[2] // q_BLGK.shape[2]
        rates = decay_BLX.shape[-1] // rate_BLH.shape[-1]  # of decay, in a head
        decays = (*by_key, rates) if rates > 1 else by_key
        tokens = Tokens(
            normalise(q_BLGK) * config.delta_key_dim**-0.5,
            normalise(k_BLGK),
            v_BLHV.reshape(*by_key, v_BLHV.shape[-1]),
            to_heads(sequence, decay_BLX, rates).reshape(decays),
            to_heads(sequence, rate_BLH, 1).reshape(by_key),
            None if positions_BL is None else positions_BL == 0,
        )
        mixed_BLGRV, recurrent = recurrence_of_shards(
            sequence.after_exchange, tokens, state[-1], config.delta_chunk
        )
        cache = given.cache and given.cache._replace(parts=(*after, recurrent))
        return sequence.to_tokens(mixed_BLGRV.reshape(v_BLHV.shape)), cache

    @staticmethod
    def empty_state(config: Sizes, x: jax.Array, shares: int) -> tuple[jax.Array, ...]:
        """The state before a sequence: last inputs of three convolutions, and the recurrence's.

        Args:
          config: sizes of the network.
          x: an array of the batch and the dtype, `[B, ...]`.
          shares: number of devices that share the heads.
        """
        groups = config.delta_key_heads // shares
        values = config.delta_value_heads // config.delta_key_heads
        key, value = config.delta_key_dim, config.delta_value_dim
        wide = jnp.promote_types(x.dtype, jnp.float32)
        tails = groups * key, groups * key, groups * values * value
        return (
            *(jnp.zeros((len(x), config.delta_taps - 1, width), x.dtype) for width in tails),
            jnp.zeros((len(x), groups, values, key, value), wide),
        )


def normalise(x: jax.Array) -> jax.Array:
    """x over its norm along the last dim, as `Qwen3NextGatedDeltaNet` computes it, float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + 1e-6)


def draw_log_decay(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform logarithms of speeds from 1 to 16."""
    return jax.random.uniform(key, shape, jnp.float32, 0.0, math.log(16))


def draw_decay_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform logarithms of steps from 0.001 to 0.1, whose softplus is about the step itself.

    Steps and speeds are those of Mamba-2 (Dao and Gu 2024): states live for 1 to 1,000 tokens. With
    the biases of 1 of transformers many would be gone after one token, and their decays would have
    no gradient.
    """
    return jax.random.uniform(key, shape, jnp.float32, math.log(0.001), math.log(0.1))


def draw_taps(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform taps, as torch's `Conv1d` draws them for one channel each."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
