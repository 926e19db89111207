"""Context parallelism as a model sees it: which tokens of a sequence a device has.

Replicas may share every sequence instead of having sequences of their own. Each then has one
sequence shard, and only attention reads tokens of other shards (Fast-LLM's
`sequence_data_parallel`; keys and values are gathered as in Grattafiori et al. 2024, section
3.3.2). This module has the case of unsharded sequences; `jaxpipe.core.mesh.ContextParallel` is the
case of sharded ones. `query_blocks` says how causal attention over unsharded sequences avoids keys
that come after its queries.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Method = Literal["gather", "ring", "ulysses"]


@dataclass(frozen=True)
class FullSequence:
    """A device that has all tokens of its sequences; exchanges are the identity.

    Attributes:
      size: number of devices that share each sequence.
      heads: how attention reaches the other devices' tokens. `heads` neighbours exchange heads by
        all-to-all, so that each has all of the group's tokens for a share of the heads, and these
        groups form a `ring` around which keys and values travel. 0: all-gather keys and values.
    """

    size: int = 1
    heads: int = 0

    @property
    def ring(self) -> int:
        """Number of groups in the ring of keys and values; 1: there is no ring.

        >>> [FullSequence(4, heads).ring for heads in (0, 1, 2, 4)]
        [1, 4, 2, 1]
        """
        return self.size // self.heads if self.heads else 1

    @property
    def exchanges_heads(self) -> bool:
        """Whether devices exchange heads; in a plain ring and where keys are gathered none do."""
        return self.heads > 1

    @property
    def after_exchange(self) -> "FullSequence":
        """This sequence after the exchange of heads: each group acts as one device."""
        return self

    def start(self, own: int) -> Any:
        """Index of this device's first token among its group's (without a ring: in the sequence).

        Args:
          own: number of this device's tokens.
        """
        return 0

    def positions(self, own: int) -> Any:
        """Positions in the sequence of this device's `own` tokens, `[own]`."""
        return self.start(own) + np.arange(own)

    def gather(self, x: Any) -> Any:
        """`[B, L, ...]` of all tokens, gathered from this device's `[B, L / size, ...]`."""
        return x

    def rotate(self, tree: Any) -> Any:
        """The values of the previous device in the ring; call it on `after_exchange`."""
        return tree

    def gather_group(self, x: Any) -> Any:
        """`[B, L, ...]` of the tokens of all neighbours that exchange heads with this device."""
        return x

    def to_heads(self, x: Any) -> Any:
        """The group's tokens for a share of the heads, from this device's tokens for all heads."""
        return x

    def to_tokens(self, x: Any) -> Any:
        """This device's tokens for all heads, from the group's tokens for a share of the heads."""
        return x


FULL_SEQUENCE = FullSequence()


def query_blocks(length: int) -> int:
    """Number of query blocks in causal attention, each with the keys up to its end.

    With n blocks (n + 1) / 2n of the square is computed. Every block is compiled separately, so
    there are two; or one where the two would differ in length or have fewer than 128 queries.

    >>> [query_blocks(length) for length in (16, 256, 257, 4096)]
    [1, 2, 1, 2]
    """
    return 2 if length % 2 == 0 and length >= 256 else 1


def padded_length(longest: int, *, bucket: int, multiple: int, shards: int, most: int) -> int:
    """Length to which rows are padded: few distinct lengths, and equal shards.

    Args:
      longest: tokens of the longest row.
      bucket: the length is rounded up to a multiple of it; 0: not rounded.
      multiple: every shard of the sequence is rounded up to a multiple of it.
      shards: equal shards of a sequence.
      most: upper limit of the result.

    >>> [padded_length(n, bucket=1024, multiple=128, shards=2, most=4096) for n in (9, 1025)]
    [1024, 2048]
    >>> padded_length(300, bucket=0, multiple=128, shards=2, most=4096)
    512
    """
    length = -(-longest // bucket) * bucket if bucket else longest
    unit = multiple * shards
    return min(-(-length // unit) * unit, most)
