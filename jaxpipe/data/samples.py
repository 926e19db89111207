"""Samples of `seq_len` inputs and targets, with random access by index.

Targets are the inputs shifted by one token. Dims: N samples, L tokens (seq_len).
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.packing import Packing
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.model.loss import IGNORE

Sample = dict[str, np.ndarray]  # `inputs`, `targets` and other inputs of layers, int32 [L]
# The values that pad a row.
PADDING = {"inputs": 0, "targets": IGNORE, "segments": -1, "positions": 0, "real": 0}


class TokenSamples(Protocol):
    """Random access to N samples, all with the same keys."""

    def __len__(self) -> int:
        """Number of samples N."""

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`, 0..N-1; packed samples may have fewer than L tokens."""

    def documents_of(self, index: int) -> list[int]:
        """Return the tokens of each document in a sample; an unpacked sample counts as one."""


def make_sample(ids: np.ndarray, counted: np.ndarray | None = None) -> Sample:
    """Make inputs and targets of ids `[L + 1]`; targets that do not count become -100.

    `counted`, bool `[L + 1]`, marks the tokens that count in the loss; None: all.

    >>> make_sample(np.arange(4), np.array([True, True, False, True]))
    {'inputs': array([0, 1, 2], dtype=int32), 'targets': array([   1, -100,    3], dtype=int32)}
    """
    ids = ids.astype(np.int32)
    targets = ids[1:] if counted is None else np.where(counted[1:], ids[1:], np.int32(IGNORE))
    return {"inputs": ids[:-1], "targets": targets}


@dataclass(frozen=True)
class StreamSamples:
    """A stream of tokens divided every L tokens, across document boundaries.

    A sample reads L + 1 tokens; its last token is the first of the next sample.
    """

    documents: ShardedDocuments
    seq_len: int  # L

    def __post_init__(self) -> None:
        if len(self.documents) <= self.seq_len:
            raise ConfigError(
                f"a sample is train.seq_len + 1 = {self.seq_len + 1} tokens, but "
                f"{self.documents.place} has {len(self.documents)}: use more data, a smaller "
                f"train.seq_len or another data.heldout_fraction."
            )

    def __len__(self) -> int:
        return (len(self.documents) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        window = index * self.seq_len, (index + 1) * self.seq_len + 1
        documents = self.documents
        return make_sample(documents.stream(*window), documents.counted_in_stream(*window))

    def documents_of(self, index: int) -> list[int]:
        """Return `[L]`: the sample counts as one document."""
        return [self.seq_len]


@dataclass(frozen=True)
class DummySamples:
    """Synthetic samples: sample i is a function of (seed, i) alone.

    Each is a random walk over the ids in steps of 1 to 4 with equal probability. The next token
    depends on the current one only, and the loss falls to ln 4 = 1.386 nats (vocab_size >= 4).
    """

    seed: int
    vocab_size: int
    seq_len: int  # L
    numbers: range  # the i of every sample

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng((self.seed, self.numbers[index]))
        steps = random.integers(1, 5, self.seq_len + 1)
        return make_sample((random.integers(self.vocab_size) + steps.cumsum()) % self.vocab_size)

    def documents_of(self, index: int) -> list[int]:
        """Return `[L]`: the sample counts as one document."""
        return [self.seq_len]


@dataclass(frozen=True)
class PackedSamples:
    """Rows of complete documents, or of pieces of longer ones, up to L tokens.

    In `shared` rows `segments` numbers the document of each token from 0, and `positions` the token
    within its document; a piece counts as a document. Other rows have `real` instead, which is 1
    for tokens and 0 for padding. The last token of a document (such as its eod) is a target only.
    """

    documents: ShardedDocuments
    packing: Packing
    shared: bool

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> Sample:
        parts: list[Sample] = []
        for document, begin, slots in self.packing.pieces(index):
            window = document, begin, begin + slots + 1
            part = make_sample(self.documents.tokens(*window), self.documents.counted(*window))
            if self.shared:
                part["segments"] = np.full(slots, len(parts), np.int32)
                part["positions"] = np.arange(slots, dtype=np.int32)
            else:
                part["real"] = np.ones(slots, np.int32)
            parts.append(part)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def documents_of(self, index: int) -> list[int]:
        """Return the tokens of each document in a row, from the packing, without reading tokens."""
        return [piece.slots for piece in self.packing.pieces(index)]


@dataclass(frozen=True)
class JoinedSamples:
    """The samples of several sources, one source after the other."""

    parts: Sequence[TokenSamples]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part, local_index = self._place(index)
        return part[local_index]

    def documents_of(self, index: int) -> list[int]:
        """Return the tokens of each document in a sample."""
        part, local_index = self._place(index)
        return part.documents_of(local_index)

    def _place(self, index: int) -> tuple[TokenSamples, int]:
        """Return the source of a sample, and the sample's index in it."""
        part = bisect.bisect_right(self._starts, index) - 1
        return self.parts[part], index - self._starts[part]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(map(len, self.parts), initial=0))
