"""The share of a mixer's heads for which a device runs over tokens of a sequence.

Devices that share a sequence may exchange heads by all-to-all, before a recurrence and after it:
each then has all tokens for a share of the heads. Otherwise it has its own tokens for all heads.

Shapes: B examples, L tokens, X channels of all heads, H heads, W their width.
"""

import jax

from jaxpipe.core.contract.devices import OneDevice
from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.recurrent.convolution import causal_convolution
from jaxpipe.model.recurrent.shards import inputs_before_shard


def shares_of_heads(devices: OneDevice, sequence: FullSequence) -> int:
    """Number of equal shares of the heads of which a device has one."""
    return devices.size * max(sequence.heads, 1)


def to_heads(sequence: FullSequence, x_BLX: jax.Array, width: int) -> jax.Array:
    """A share of the heads, each of a width, from this device's tokens for all heads."""
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

    See `causal_convolution` for the arguments; `before_BTX` are of the share of the heads. The last
    inputs are those of the sequence's last device.
    """
    x_BLX = to_heads(sequence, x_BLX, width)
    taps_TX = weights_of_heads(sequence, taps_TX, width)
    if bias_X is not None:
        bias_X = weights_of_heads(sequence, bias_X[None], width)[0]
    shards, last_BTX = sequence.after_exchange, None
    if shards.size > 1:
        before_BTX, last_BTX = inputs_before_shard(shards, x_BLX, before_BTX)
    made_BLX, own_last_BTX = causal_convolution(x_BLX, taps_TX, before_BTX, positions_BL, bias_X)
    made_BLHW = jax.nn.silu(made_BLX).reshape(*made_BLX.shape[:2], -1, width)
    return made_BLHW, own_last_BTX if last_BTX is None else last_BTX
