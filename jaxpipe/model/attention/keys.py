"""Keys and values of attention: what they are made of, and how they reach a device's queries.

Shapes: B examples, L tokens of a device's sequence shard, S keys, G key/value heads, K head dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpipe.model.attention.case import AttentionCase

Arrays = tuple[jax.Array, ...]
# Makes keys and values `[B, S, G, K]` of `Keys.parts`, of any tokens.
Make = Callable[..., tuple[jax.Array, jax.Array]]


class Cache(NamedTuple):
    """What keys and values of a sequence's tokens so far are made of, with slices.

    Attributes:
      parts: buffers `[B, S, ...]` for all S tokens; what comes after the tokens so far is not read.
      begin: number of the sequence's tokens in earlier slices.
    """

    parts: Arrays
    begin: jax.Array | int


class Keys(NamedTuple):
    """The keys and values of tokens, or what they are made of.

    Attributes:
      parts: arrays `[B, L, heads, width]`: keys and values, or with `make` what these are made of,
        such as latents. Devices all-gather them and send them round a ring, and slices cache them.
      make: makes keys and values of `parts`; None: they are keys and values.
      by_block: whether `make` may be called for each block of keys, whose gradients at what it
        closes over are added.
      sink_H: score of one more key of each head, whose value is 0 (an attention sink), or None.
      tokens: how many of the keys are of the current slice; 0: `reach` has not been called.
      begin: index of the first of these.
    """

    parts: Arrays
    make: Make | None = None
    by_block: bool = True
    sink_H: jax.Array | None = None
    tokens: int = 0
    begin: Any = 0

    def reach(self, case: AttentionCase, cache: Cache | None) -> tuple["Keys", Cache | None]:
        """Return the keys that this device's queries attend to, and with slices the new cache.

        Where devices exchange heads, keys and values are made first: latents have no heads. Where
        keys go round a ring, those of other devices are not among them.
        """
        sequence = case.sequence
        keys = self.opened() if sequence.exchanges_heads else self
        parts, sink_H = tuple(map(sequence.to_heads, keys.parts)), keys.sink_H
        if sink_H is not None:  # as one token of each neighbour, of which the first has the sinks
            sink_H = sequence.to_heads(sink_H[None, None, :, None])[0, 0, :, 0]
        if case.gathers:
            parts = tuple(map(sequence.gather, parts))
        tokens, begin = parts[0].shape[1], 0
        if cache is not None:
            begin = cache.begin // sequence.ring
            parts = tuple(_write(*pair, begin) for pair in zip(cache.parts, parts, strict=True))
            cache = Cache(parts, cache.begin)
        keys = keys._replace(parts=parts, sink_H=sink_H, tokens=tokens, begin=begin)
        return keys if keys.by_block else keys.opened(), cache

    def opened(self) -> "Keys":
        """The same with keys and values as its parts."""
        if self.make is None:
            return self
        return self._replace(parts=self.make(*self.parts), make=None)

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        made = self.parts if self.make is None else jax.eval_shape(self.make, *self.parts)
        return made[1].shape[-1]

    def of_slice(self) -> Arrays:
        """The parts of as many keys as a slice has, for tracing."""
        return tuple(x[:, : self.tokens] for x in self.parts)


def _write(all_BSGK: jax.Array, own_BLGK: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(all_BSGK, own_BLGK, begin, axis=1)
