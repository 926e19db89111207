"""How the states of a linear recurrence decay within a chunk: per head, or per channel of its key.

Every factor is the exponential of a sum of logarithms that are 0 or less, from an earlier token to
a later one. So none exceeds 1, and where one is too small for a float, so is what it multiplies.

Shapes: N chunks of C tokens, B examples, G key heads, R value heads for each of them, K and V the
widths of a key and of a value; X is 1 where all channels of a key decay alike, else K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ROWS = 4  # blocks of fewer rows are multiplied without a matrix product


class HeadDecays(NamedTuple):
    """The factors between the tokens of a chunk, and between them and its ends, of every head.

    Attributes:
      pairs: from token j to token i, `[N, B, G, R, C, C]`; 0 where j comes after i.
      enters: from the state before the chunk to each token, `[N, B, G, R, C, 1]`.
      leaves: from each token to the state after the chunk, of the same shape.
      passes: from one of these states to the other, `[N, B, G, R, 1, 1]`.
    """

    pairs: jax.Array
    enters: jax.Array
    leaves: jax.Array
    passes: jax.Array

    @classmethod
    def of(cls, decay: jax.Array, starts: jax.Array | None) -> "HeadDecays":
        """Compute them of the logarithms of each token's decay, and of the starts of documents."""
        total = jnp.cumsum(decay, axis=-2)
        size = total.shape[-2]
        seen = jnp.tri(size, dtype=bool).reshape(*(1,) * (total.ndim - 2), size, size)
        number = None if starts is None else jnp.cumsum(starts, axis=-2)  # of starts so far
        if number is not None:
            seen = seen & (number == number.mT)
            # The gradient of a cumulative sum would be 0 at other documents up to rounding alone.
            total = seen.astype(decay.dtype) @ decay
        enters, until_end = jnp.exp(total), total[..., -1:, :] - total
        if number is None:
            leaves = jnp.exp(until_end)
        else:
            leaves = _exp_where(number == number[..., -1:, :], until_end)
            enters = jnp.where(number == 0, enters, 0)
        pairs = _exp_where(seen, total - total.mT)
        return cls(pairs, enters, leaves, enters[..., -1:, :])

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Products of queries and keys, times the factors between them, `[N, B, G, R, C, C]`."""
        return (q @ k.mT) * self.pairs

    def system(self, rate: jax.Array, k: jax.Array) -> jax.Array:
        """Products of keys, likewise, times the rates of the later ones."""
        return rate * (k @ k.mT) * self.pairs

    def reads(self, solved: jax.Array, k: jax.Array) -> jax.Array:
        """Sums of keys, times the factors since the state before the chunk, `[..., C, K]`."""
        return (solved * self.enters.mT) @ k

    def writes(self, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Keys at the state after the chunk, and the factors on their values; None: all are 1."""
        return k, self.leaves

    def outputs(self, q: jax.Array, before: jax.Array) -> jax.Array:
        """What queries read of the state before the chunk, `[N, B, G, R, C, V]`."""
        return self.enters * (q @ before)


class ChannelDecays(NamedTuple):
    """The same where every channel of a key decays at its own rate.

    A product over channels of two tokens' factor is no product of a matrix with a factor. So tokens
    of two neighbouring blocks meet at the end of the first: the factor from there to the later
    token multiplies its query, and the factor from the earlier token to there its key. Blocks of 1,
    2, 4, ... tokens have all pairs of tokens of a chunk between them.

    Attributes:
      levels: for blocks of W = 1, 2, 4, ... C / 2 tokens the factors of the tokens in every second
        block, from the end of the block before it; and of those in the block before it, to its
        end. `[N, B, G, R, C / 2W, W, K]` each.
      seen: whether two tokens are of one document; None: all are.
      enters, leaves, passes: as of `HeadDecays`, with K in place of the last dim.
    """

    levels: tuple[tuple[jax.Array, jax.Array], ...]
    seen: jax.Array | None
    enters: jax.Array
    leaves: jax.Array
    passes: jax.Array

    @classmethod
    def of(cls, decay: jax.Array, starts: jax.Array | None) -> "ChannelDecays":
        """Compute them of the logarithms of each token's decay, and of the starts of documents."""
        since = decay[..., None, :]  # the sums since the block before a token's block
        until = jnp.zeros_like(since)  # and from a token to the end of its block
        levels, seen = [], None
        while since.shape[-3] > 1:
            first_since, last_since = _pairs_of_blocks(since)
            first_until, last_until = _pairs_of_blocks(until)
            levels.append((jnp.exp(last_since), jnp.exp(first_until)))
            since = jnp.concatenate([first_since, first_since[..., -1:, :] + last_since], -2)
            until = jnp.concatenate([first_until + last_since[..., -1:, :], last_until], -2)
        enters, leaves = jnp.exp(since[..., 0, :, :]), jnp.exp(until[..., 0, :, :])
        if starts is not None:
            number = jnp.cumsum(starts, axis=-2)
            seen = number == number.mT
            enters = jnp.where(number == 0, enters, 0)
            leaves = jnp.where(number == number[..., -1:, :], leaves, 0)
        return cls(tuple(levels), seen, enters, leaves, enters[..., -1:, :].mT)

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Products of queries and keys, times the factors between them, `[N, B, G, R, C, C]`."""
        own = (q * k).sum(-1)[..., None, None]
        found = jnp.broadcast_to(own, (*self.enters.shape[:-1], 1, 1))
        for since, until in self.levels:
            first, last = _pairs_of_blocks(found)
            corner = jax.checkpoint(_between_blocks)(q, k, since, until)
            above = jnp.concatenate([first, jnp.zeros_like(corner)], -1)
            found = jnp.concatenate([above, jnp.concatenate([corner, last], -1)], -2)
        scores = found[..., 0, :, :]
        return scores if self.seen is None else jnp.where(self.seen, scores, 0)

    def system(self, rate: jax.Array, k: jax.Array) -> jax.Array:
        """Products of keys, likewise, times the rates of the later ones."""
        return rate * self.scores(k, k)

    def reads(self, solved: jax.Array, k: jax.Array) -> jax.Array:
        """Sums of keys, times the factors since the state before the chunk, `[..., C, K]`."""
        return solved @ (self.enters * k)

    def writes(self, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Keys at the state after the chunk, and the factors on their values; None: all are 1."""
        return self.leaves * k, None

    def outputs(self, q: jax.Array, before: jax.Array) -> jax.Array:
        """What queries read of the state before the chunk, `[N, B, G, R, C, V]`."""
        return (self.enters * q) @ before


def _exp_where(seen: jax.Array, x: jax.Array) -> jax.Array:
    """The exponentials of what is seen, and 0; what is not may be large, and its own infinite."""
    return jnp.where(seen, jnp.exp(jnp.where(seen, x, 0)), 0)


def _pairs_of_blocks(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second of every two neighbouring blocks, `[..., blocks, W, X]`."""
    *lead, count, rows, columns = blocks.shape
    pairs = blocks.reshape(*lead, count // 2, 2, rows, columns)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _between_blocks(q: jax.Array, k: jax.Array, since: jax.Array, until: jax.Array) -> jax.Array:
    """Scores of the queries in every second block with the keys in the block before it.

    `[..., C, K]` of queries and keys, and the factors of one of the `levels`, to
    `[..., C / 2W, W, W]`.
    """
    *_, count, rows, width = since.shape

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], 2 * count, rows, width)

    queries = _pairs_of_blocks(blocks(q))[1] * since
    keys = _pairs_of_blocks(blocks(k))[0] * until
    if rows < _ROWS:
        return (queries[..., :, None, :] * keys[..., None, :, :]).sum(-1)
    return queries @ keys.mT
