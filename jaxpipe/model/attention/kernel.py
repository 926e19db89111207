"""What computes attention, once its keys are where its queries are.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.model.attention.blocks import BlockKernel, KeyRange
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.attention.keys import Keys
from jaxpipe.model.attention.ring import RingLayout, ring_attention, slice_positions
from jaxpipe.model.kernels.cudnn_packed import RowDocuments

# Maps attention probabilities `[B, H, L, S]` from the `query`-th query and `key`-th key; or None.
OnShares = Callable[..., jax.Array] | None


class Queries(NamedTuple):
    """Queries of a device, and what limits the keys that each of them attends to.

    Attributes:
      q_BLHK: queries, of a shard of the current slice.
      begin: number of the sequence's tokens in earlier slices.
      documents: of packed rows, where a query attends only to its own document; else None.
      on_shares: `OnShares`, of kernels that have probabilities.
    """

    q_BLHK: jax.Array
    begin: jax.Array | int = 0
    documents: RowDocuments | None = None
    on_shares: OnShares = None

    def place_L(self, sequence: FullSequence) -> jax.Array:
        """Positions in the full sequence, which devices share as `sequence`."""
        return self.begin + slice_positions(sequence, self.q_BLHK.shape[1])

    @property
    def position_BL(self) -> jax.Array | None:
        """Positions in the document, to whose start a query attends; None: no documents."""
        return None if self.documents is None else self.documents.positions


class Kernel(Protocol):
    """A way to compute attention."""

    def supports(self, case: AttentionCase) -> str | None:
        """None, or a sentence that says why it does not compute the case."""

    def attend(self, case: AttentionCase, queries: Queries, keys: Keys) -> jax.Array:
        """Attention output of the queries over their keys, as wide as values, `[B, L, H, K]`.

        The case is supported, and its `sequence` is the one after the exchange of heads.
        """


def attend_in_blocks(
    case: AttentionCase, queries: Queries, keys: Keys, blocks: BlockKernel
) -> jax.Array:
    """Attention by `ring_attention`: block by block, over keys here and those of a ring."""
    place_L = queries.place_L(case.sequence)
    key_range = KeyRange.of(place_L, len(queries.q_BLHK), case.window, queries.position_BL)
    of_keys, make, weights = FULL_SEQUENCE if case.gathers else case.sequence, keys.make, ()
    if make is not None:
        make, weights = jax.closure_convert(make, *keys.of_slice())
    layout = RingLayout(of_keys, keys.tokens, blocks, make)
    begin = jnp.asarray(keys.begin, jnp.int32)
    operands = queries.q_BLHK, *keys.parts, key_range, begin, keys.sink_H, tuple(weights)
    return ring_attention(layout, *operands)
