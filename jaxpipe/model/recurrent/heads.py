"""The share of a mixer's heads for which a device runs over all tokens of a sequence.

Devices that share a sequence exchange heads by all-to-all, before a recurrence and after it.

Shapes: B examples, L tokens, X channels of all heads, H heads, W their width.
"""

import jax

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.recurrent.convolution import causal_convolution


def to_heads(sequence: FullSequence, x_BLX: jax.Array, width: int) -> jax.Array:
    """All tokens of a share of the heads, each of a width, from a shard with all heads."""
    x_BLHW = x_BLX.reshape(*x_BLX.shape[:2], -1, width)
    x_BLHW = sequence.to_heads(x_BLHW)
    return x_BLHW.reshape(*x_BLHW.shape[:2], -1)


def weights_of_heads(sequence: FullSequence, weights_TX: jax.Array, width: int) -> jax.Array:
    """The weights `[T, ...]` of the same share of the heads, from those of all heads."""
    # As of one token of each neighbour, of which the first has the weights of all heads.
    return to_heads(sequence, weights_TX[None], width)[0, : len(weights_TX)]


def convolve_heads(
    sequence: FullSequence, x_BLX: jax.Array, taps_TX: jax.Array, width: int,
    before_BTX: jax.Array, positions_BL: jax.Array | None, bias_X: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return SiLU of a share's causal convolutions, `[B, L, H, W]`, and its last T - 1 inputs.

    See `causal_convolution` for the arguments; `before_BTX` are of the share of the heads.
    """
    x_BLX = to_heads(sequence, x_BLX, width)
    taps_TX = weights_of_heads(sequence, taps_TX, width)
    if bias_X is not None:
        bias_X = weights_of_heads(sequence, bias_X[None], width)[0]
    x_BLX, last = causal_convolution(x_BLX, taps_TX, before_BTX, positions_BL, bias_X)
    return jax.nn.silu(x_BLX).reshape(*x_BLX.shape[:2], -1, width), last
