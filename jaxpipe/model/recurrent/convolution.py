"""Short causal convolutions of each channel, over slices of a sequence and within documents.

Shapes: B examples, L tokens, T taps, X channels.
"""

import jax
import jax.numpy as jnp

from jaxpipe.model.layers.parts import broadcast_last


def causal_convolution(
    x_BLX: jax.Array, taps_TX: jax.Array, before_BTX: jax.Array, positions_BL: jax.Array | None,
    bias_X: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return bias + sum over t of taps[t] * x at T - 1 - t tokens before; and the last T - 1 x.

    Products and sum are float32, or wider if x is, and rounded to x's dtype.

    Args:
      x_BLX: inputs.
      taps_TX: weights, the last of which multiplies the token itself.
      before_BTX: the T - 1 tokens before the first; zeros where a sequence begins.
      positions_BL: number of each token in its document, beyond whose start nothing is read; None:
        a row is one text.
      bias_X: None: there is none.
    """
    taps, length = taps_TX.shape[0], x_BLX.shape[1]
    wide = jnp.promote_types(x_BLX.dtype, jnp.float32)
    window = jnp.concatenate([before_BTX.astype(x_BLX.dtype), x_BLX], axis=1)
    total = jnp.zeros(x_BLX.shape, wide)
    for tap in range(taps):
        weight = broadcast_last(taps_TX[tap], total)
        term = window[:, tap : tap + length].astype(wide) * weight
        if positions_BL is not None and tap < taps - 1:
            term = jnp.where(positions_BL[..., None] >= taps - 1 - tap, term, 0)
        total += term
    if bias_X is not None:
        total += broadcast_last(bias_X, total)
    return total.astype(x_BLX.dtype), window[:, length:]
