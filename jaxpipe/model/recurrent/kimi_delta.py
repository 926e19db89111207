"""Kimi delta attention as a layer's token mixer (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692).

Shapes: B examples, L tokens, D model, H heads, K the width of a head, X = H K channels. Where
devices share a layer, H counts this device's shard.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.layers.parts import Init, LayerInputs, broadcast_last
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.gated_delta import GatedDeltaNetwork, Sizes, draw_decay_bias


class KimiDeltaAttention(GatedDeltaNetwork):
    """A gated delta network in which every channel of a key has its own decay.

    Source: transformers' `KimiLinearDeltaAttention`. Decays, and the gates on the output, come from
    x by two products with a narrow vector between them, which each device computes itself. Their
    weights stay in the dtype of x under fp8, and have no adapters.
    """

    PRODUCTS: ClassVar[tuple[str, ...]] = ("wq", "wk", "wv", "wo")

    def init_gates(self, config: Sizes, parts: LayerParts, init: Init) -> None:
        """Create the parameters of the decay of states, and of the gate on the output."""
        d, width = config.d_model, config.delta_key_dim
        channels = config.delta_key_heads * width
        whole, columns = parts.own(differs=parts.devices.size > 1), parts.cut(1)
        self.decay_a = init("delta/decay_a", (d, width), 0.02, whole)
        self.decay_b = init("delta/decay_b", (width, channels), 0.02, columns)
        self.gate_a = init("delta/gate_a", (d, width), 0.02, whole)
        self.gate_b = init("delta/gate_b", (width, channels), 0.02, columns)
        self.decay_bias = init("delta/decay_bias", (channels,), draw_decay_bias, parts.cut(0))

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; with slices also the state after the slice."""
        x_BLD, dot = self.devices.enter(x_BLD), given.dot
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        products = dot(x_BLD, wq=self.wq[...], wk=self.wk[...], wv=self.wv[...])
        rate_BLH = (x_BLD @ self.rate[...].astype(x_BLD.dtype)).astype(wide)
        rate_BLH = jax.nn.sigmoid(rate_BLH)
        mixed_BLHK, cache = self.mix(products, rate_BLH, self._decays(x_BLD), given)
        gate_BLX = _narrow(x_BLD, self.gate_a[...], self.gate_b[...]).astype(wide)
        gate_BLHK = jax.nn.sigmoid(gate_BLX).reshape(mixed_BLHK.shape)
        gated_BLHK = (self.norm(mixed_BLHK.astype(wide)) * gate_BLHK).astype(x_BLD.dtype)
        (made_BLD,) = dot(gated_BLHK.reshape(gate_BLX.shape), wo=self.wo[...])
        return self.devices.leave(made_BLD), cache

    def _decays(self, x_BLD: jax.Array) -> jax.Array:
        """The logarithm of the decay of every channel before each token, `[B, L, X]`."""
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        step_BLX = _narrow(x_BLD, self.decay_a[...], self.decay_b[...]).astype(wide)
        step_BLX = jax.nn.softplus(step_BLX + broadcast_last(self.decay_bias[...], step_BLX))
        speed_H = jnp.exp(self.log_decay[...].astype(wide))
        speed_X = jnp.repeat(speed_H, self.config.delta_key_dim)
        return -broadcast_last(speed_X, step_BLX) * step_BLX


def _narrow(x_BLD: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiply x with two matrices, in its dtype."""
    return x_BLD @ first.astype(x_BLD.dtype) @ second.astype(x_BLD.dtype)
