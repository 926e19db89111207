"""Samples of `seq_len` inputs and targets, read by index.

The targets of a model are its inputs one token on. N samples, L tokens (seq_len).
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.documents import Documents, ShardedDocuments
from jaxpipe.data.packing import Packing
from jaxpipe.model.loss import IGNORE

Sample = dict[str, np.ndarray]  # `inputs` and `targets`, int32 [L], and what else layers are given
# What rows end in that are longer than what they hold.
PADDING = {"inputs": 0, "targets": IGNORE, "segments": -1, "positions": 0, "real": 0}


class Samples(Protocol):
    """Random access to N samples, all with the same leaves."""

    def __len__(self) -> int:
        """Number of samples N."""

    def __getitem__(self, index: int) -> Sample:
        """The sample of a number in 0..N-1; of documents it may have fewer than L tokens."""

    def documents_of(self, index: int) -> list[int]:
        """How many tokens a sample has of each of its documents; what is cut blindly is one."""


def sample_of(ids: np.ndarray, counted: np.ndarray | None = None) -> Sample:
    """Inputs and targets of ids `[L + 1]`; targets that do not count (`bool [L + 1]`) are ignored.

    >>> sample_of(np.arange(4), np.array([True, True, False, True]))
    {'inputs': array([0, 1, 2], dtype=int32), 'targets': array([   1, -100,    3], dtype=int32)}
    """
    ids = ids.astype(np.int32)
    targets = ids[1:] if counted is None else np.where(counted[1:], ids[1:], np.int32(IGNORE))
    return {"inputs": ids[:-1], "targets": targets}


@dataclass(frozen=True)
class CutSamples:
    """A stream of tokens cut every L of them, whatever its documents.

    A sample takes L + 1 tokens, of which the last is the first of the next sample.
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
        stretch = index * self.seq_len, (index + 1) * self.seq_len + 1
        documents = self.documents
        return sample_of(documents.stream(*stretch), documents.counted_in_stream(*stretch))

    def documents_of(self, index: int) -> list[int]:
        """All are one."""
        return [self.seq_len]


@dataclass(frozen=True)
class DummySamples:
    """Samples made up as they are read: sample i is a function of (seed, i) alone.

    Each is a walk over the ids in steps of 1 to 4, all as likely, so one token says what the next
    may be, and the loss of a model falls to ln 4 = 1.386 nats (from four ids on).
    """

    seed: int
    vocab_size: int
    seq_len: int  # L
    numbers: range  # the i of each sample

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng((self.seed, self.numbers[index]))
        steps = random.integers(1, 5, self.seq_len + 1)
        return sample_of((random.integers(self.vocab_size) + steps.cumsum()) % self.vocab_size)

    def documents_of(self, index: int) -> list[int]:
        """All are one."""
        return [self.seq_len]


@dataclass(frozen=True)
class PackedSamples:
    """Rows of whole documents, or of pieces of longer ones, up to L of their tokens.

    In `shared` rows `segments` says which document a token belongs to, 0.., and `positions` where
    in it, from 0 on; a piece is a document of its own. Rows that are not have `real`, 1 of each
    token, as it is 0 of padding. What a document ends with (such as the id that marks its end) is
    its last target, and the input of nothing.
    """

    documents: Documents
    packing: Packing
    shared: bool

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> Sample:
        parts: list[Sample] = []
        for document, begin, slots in self.packing.pieces(index):
            stretch = document, begin, begin + slots + 1
            part = sample_of(self.documents.tokens(*stretch), self.documents.counted(*stretch))
            if self.shared:
                part["segments"] = np.full(slots, len(parts), np.int32)
                part["positions"] = np.arange(slots, dtype=np.int32)
            else:
                part["real"] = np.ones(slots, np.int32)
            parts.append(part)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def documents_of(self, index: int) -> list[int]:
        """How many tokens it has of each, as the packing says without reading them."""
        return [piece.slots for piece in self.packing.pieces(index)]


@dataclass(frozen=True)
class JoinedSamples:
    """Those of several sources, one after the other."""

    parts: Sequence[Samples]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part, own = self._place(index)
        return part[own]

    def documents_of(self, index: int) -> list[int]:
        """Those of its source."""
        part, own = self._place(index)
        return part.documents_of(own)

    def _place(self, index: int) -> tuple[Samples, int]:
        """The source of a sample, and its number there."""
        part = bisect.bisect_right(self._starts, index) - 1
        return self.parts[part], index - self._starts[part]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(map(len, self.parts), initial=0))
