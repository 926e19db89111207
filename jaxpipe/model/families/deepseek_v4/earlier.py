"""What a device's tokens read of earlier ones: of other devices' shards, and of earlier slices.

With context parallelism devices have consecutive shards of a sequence. They all-gather the last few
tokens of each shard, which the next one reads, and all entries. With sequence slices both are
written into buffers that slices hand on. Tokens and entries of later slices may be there, too:
whoever reads masks them by their places.

Shapes: B examples, L tokens of a device's shard (of a slice), N tokens before them, T entries of
the shard, S entries of the sequence, X channels.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.attention.ring import slice_positions
from jaxpipe.model.options import Sharing


class EarlierTokens:
    """The tokens and entries before a device's tokens, by name; and what slices hand on.

    Attributes:
      place_L: positions of the device's tokens in the sequence.
      longest: number of the sequence's tokens.
      after: buffers after the current slice, by name; None: there are no slices.
    """

    def __init__(self, sharing: Sharing, length: int, cache: Cache | None):
        self.sequence, self.length = sharing.sequence, length
        of_slice = length * self.sequence.size
        self.longest = sharing.slices * of_slice
        self.place_L = slice_positions(self.sequence, length)
        self.after: dict[str, jax.Array] | None = None
        if cache is not None:
            self.place_L += cache.begin
            self.after, self._number = dict(cache.parts), cache.begin // of_slice

    def with_tokens_before(self, name: str, x_BLX: jax.Array, count: int) -> jax.Array:
        """x of the device's tokens and of `count` tokens before them, `[B, N + L, X]`.

        Where there are no tokens before, these are zeros.
        """
        own = min(self.length, count)
        if not own:
            return x_BLX
        ends_BEX = self.sequence.gather(x_BLX[:, self.length - own :])
        before_BNX = jnp.zeros((len(x_BLX), count, *x_BLX.shape[2:]), x_BLX.dtype)
        if self.after is not None:
            of_slice = min(ends_BEX.shape[1], count)
            first = self._number * of_slice
            last_BEX = ends_BEX[:, ends_BEX.shape[1] - of_slice :]
            written = lax.dynamic_update_slice_in_dim(
                self.after[name], last_BEX, count + first, axis=1
            )
            self.after[name] = written
            before_BNX = lax.dynamic_slice_in_dim(written, first, count, axis=1)
        if self.sequence.size > 1:
            known = jnp.concatenate([before_BNX, ends_BEX], axis=1)
            first = self.sequence.start(own)
            before_BNX = lax.dynamic_slice_in_dim(known, first, count, axis=1)
        return jnp.concatenate([before_BNX, x_BLX], axis=1)

    def with_entries_before(self, name: str, x_BTX: jax.Array) -> jax.Array:
        """x of the entries of all devices and slices, in the order of the sequence, `[B, S, X]`."""
        x_BTX = self.sequence.gather(x_BTX)
        if self.after is None:
            return x_BTX
        begin = self._number * x_BTX.shape[1]
        written = lax.dynamic_update_slice_in_dim(self.after[name], x_BTX, begin, axis=1)
        self.after[name] = written
        return written


def tokens_kept(count: int, sharing: Sharing, length: int) -> int:
    """Number of tokens in the buffer of `with_tokens_before`, for shards of a length."""
    return count + sharing.slices * min(count, length * sharing.sequence.size)
