"""Sequence-data parallelism as a model sees it: which tokens of a sequence a device has.

Replicas along dp may share every sequence instead of having sequences of their own: each then has
one stretch of its tokens, and attention alone looks beyond it (Fast-LLM's `sequence_data_parallel`;
keys and values are gathered as in Grattafiori et al. 2024, section 3.3.2). This module has the case
of whole sequences; `jaxpipe.parallel.SequenceDataParallel` is the other. A device that has whole
sequences need not look at keys after its queries: `query_blocks`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WholeSequence:
    """A device that has all tokens of its sequences."""

    size: int = 1

    def start(self, own: int) -> Any:
        """Where in the sequence this device's stretch of `own` tokens begins."""
        return 0

    def gather(self, x: Any) -> Any:
        """The `[B, L, ...]` of all tokens, from those of this device's."""
        return x


WHOLE_SEQUENCE = WholeSequence()


def query_blocks(length: int) -> int:
    """In how many blocks of queries causal attention is made, each with the keys up to its end.

    Of n blocks (n + 1) / 2n of the square is computed. Four at most, for each is code of its own,
    and none of fewer than 128 queries, which take longer to compile than they save.

    >>> [query_blocks(length) for length in (16, 128, 256, 258, 4096)]
    [1, 1, 2, 2, 4]
    """
    return next(n for n in (4, 2, 1) if n == 1 or (length % n == 0 and length >= 128 * n))
