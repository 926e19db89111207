"""Context parallelism as a model sees it: which tokens of a sequence a device has.

Replicas along dp may share every sequence instead of having sequences of their own: each then has
one stretch of its tokens, and attention alone looks beyond it (Fast-LLM's `sequence_data_parallel`;
keys and values are gathered as in Grattafiori et al. 2024, section 3.3.2). This module has the case
of whole sequences; `jaxpipe.parallel.ContextParallel` is the other. A device that has whole
sequences need not look at keys after its queries: `query_blocks`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Method = Literal["gather", "ring", "ulysses"]


@dataclass(frozen=True)
class WholeSequence:
    """A device that has all tokens of its sequences.

    Where `size` devices share one, this is how attention reaches the tokens of others: `heads`
    neighbours exchange theirs, so that each has all of these tokens for a share of the heads, and
    groups of so many form a `ring`, round which keys and values go. With 0 keys and values of all
    are gathered.
    """

    size: int = 1
    heads: int = 0

    @property
    def ring(self) -> int:
        """Groups round which keys and values go; 1: they do not.

        >>> [WholeSequence(4, heads).ring for heads in (0, 1, 2, 4)]
        [1, 4, 2, 1]
        """
        return self.size // self.heads if self.heads else 1

    @property
    def exchanged(self) -> "WholeSequence":
        """The same sequence where heads are exchanged: a group of neighbours is as one device."""
        return self

    def start(self, own: int) -> Any:
        """Where in the sequence this device's first token stands, of `own` in their order."""
        return 0

    def places(self, own: int) -> Any:
        """Where in the sequence this device's `own` tokens stand, `[own]`."""
        return self.start(own) + np.arange(own)

    def gather(self, x: Any) -> Any:
        """The `[B, L, ...]` of all tokens, from those of this device's."""
        return x

    def turned(self, tree: Any) -> Any:
        """What the device before this one has, in the ring of an `exchanged` sequence."""
        return tree

    def together(self, x: Any) -> Any:
        """The `[B, L, ...]` of the tokens of neighbours that exchange heads."""
        return x

    def to_heads(self, x: Any) -> Any:
        """The tokens of such neighbours for a share of the heads, from its own for all."""
        return x

    def to_tokens(self, x: Any) -> Any:
        """All heads of this device's tokens, from a share of them of all neighbours'."""
        return x


WHOLE_SEQUENCE = WholeSequence()


def query_blocks(length: int) -> int:
    """In how many blocks of queries causal attention is made, each with the keys up to its end.

    Of n blocks (n + 1) / 2n of the square is computed. Each is code of its own to compile, so they
    are two, and one where they would be unequal or of fewer than 128 queries.

    >>> [query_blocks(length) for length in (16, 256, 257, 4096)]
    [1, 2, 1, 2]
    """
    return 2 if length % 2 == 0 and length >= 256 else 1


def padded_length(longest: int, *, bucket: int, multiple: int, stretches: int, most: int) -> int:
    """What rows are padded to, so that few lengths differ and every device has as many tokens.

    That is `longest`, rounded up to a multiple of `bucket` (0: of 1), and so that each of its equal
    `stretches` is one of `multiple`; but never more than `most`.

    >>> [padded_length(n, bucket=1024, multiple=128, stretches=2, most=4096) for n in (9, 1025)]
    [1024, 2048]
    >>> padded_length(300, bucket=0, multiple=128, stretches=2, most=4096)
    512
    """
    length = -(-longest // bucket) * bucket if bucket else longest
    unit = multiple * stretches
    return min(-(-length // unit) * unit, most)
