"""Documents of token ids in a fixed order, wherever they lie; one after the other, their stream.

A source is one or several shards, each a file. What is known of a shard without reading it is
enough to open it, so that opening costs time in the number of shards.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxpipe.config import ConfigError


class Documents(Protocol):
    """N documents of token ids in a fixed order; opening costs time in shards, not tokens."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, integers `[N]`, none of them 0."""

    @property
    def fingerprint(self) -> str:
        """What tells them from other documents."""

    def tokens(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Ids of a document, or those from `begin` to `end` of it: integers `[tokens]`.

        Raises `ConfigError` with file and offset where one is outside the vocabulary.
        """

    def counted(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray | None:
        """Which of the same tokens count in the loss as targets, `bool [tokens]`; None: all."""


class Shard(Protocol):
    """A file of documents, or of tokens without borders, which are one document."""

    path: Path
    size: int  # tokens
    digest: str
    whole_digest: Callable[[], str] | None  # of all its bytes, where `digest` is of some
    vouched: bool  # whether its ids are known to be in the vocabulary
    masked: bool  # whether it says which tokens count in the loss

    def lengths(self) -> np.ndarray:
        """Tokens of every document, integers `[documents]`."""

    def document_start(self, token: int) -> int:
        """Where the document with this token begins."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids of the tokens from `begin` to `end`, integers `[end - begin]`."""

    def counted(self, begin: int, end: int) -> np.ndarray | None:
        """Which of them count in the loss, `bool [end - begin]`; None: all."""


@dataclass(frozen=True)
class ShardedDocuments:
    """The documents of several shards, or those in a stretch of their stream of tokens."""

    shards: Sequence[Shard]
    vocab_size: int
    begin: int  # the stretch, in tokens of the stream of all shards
    end: int
    place: str  # where they are, for messages
    tokenizer: str = ""  # digest of the one that made them, if known

    def __len__(self) -> int:
        """Tokens in all."""
        return self.end - self.begin

    @cached_property
    def fingerprint(self) -> str:
        """What tells them from other documents."""
        digests = [shard.digest for shard in self.shards]
        if len(digests) > 1:
            digests = [blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()]
        return self._named(digests[0])

    @property
    def whole_fingerprint(self) -> Callable[[], str] | None:
        """The fingerprint by a digest of the whole file, where `fingerprint` has another of it."""
        digest = self.shards[0].whole_digest if len(self.shards) == 1 else None
        return digest and (lambda: self._named(digest()))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, integers `[N]`, none of them 0; made anew by every call."""
        starts, ends = self._borders[:-1], self._borders[1:]
        lengths = np.empty(len(ends), np.int32)
        np.subtract(ends, starts, out=lengths, casting="same_kind")
        return lengths if lengths.sum(dtype=np.int64) == len(self) else ends - starts

    def tokens(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Ids of a document, or those from `begin` to `end` of it: integers `[tokens]`."""
        return self.stream(*self._stretch(index, begin, end))

    def counted(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray | None:
        """Which of the same tokens count in the loss; None: all."""
        return self.counted_in_stream(*self._stretch(index, begin, end))

    def stream(self, begin: int, end: int) -> np.ndarray:
        """Ids of the tokens from `begin` to `end`, across borders of documents: `int32 [tokens]`.

        Raises `ConfigError` with file and offset where one is outside the vocabulary.
        """
        parts = []
        for shard, first, last in self._within(begin, end):
            ids = shard.read(first, last)
            if not shard.vouched:
                check_ids(ids, self.vocab_size, shard.path, first)
            parts.append(ids.astype(np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def counted_in_stream(self, begin: int, end: int) -> np.ndarray | None:
        """Which of the tokens from `begin` to `end` count in the loss; None: all."""
        parts = [
            (shard.counted(first, last), last - first)
            for shard, first, last in self._within(begin, end)
        ]
        if all(counted is None for counted, _ in parts):
            return None
        return np.concatenate([np.ones(n, bool) if c is None else c for c, n in parts])

    def split(self, fraction: float) -> tuple["ShardedDocuments", "ShardedDocuments"]:
        """All but the last `fraction` of the tokens, and these; no document is in both.

        The document that the cut falls in belongs to the second, whole; only the very first
        document is divided.
        """
        cut = self.end - round(fraction * len(self))
        number = self._shard_at(min(cut, self.end - 1))
        base = self._starts[number]
        border = base + self.shards[number].document_start(min(cut, self.end - 1) - base)
        if cut < self.end and border > self.begin:
            cut = border
        first, second = f"{self.place}[:{cut}]", f"{self.place}[{cut}:]"
        return replace(self, end=cut, place=first), replace(self, begin=cut, place=second)

    def _named(self, digest: str) -> str:
        """The stretch of the stream of files with a digest."""
        return f"{digest} tokens={len(self)}" + (f" from={self.begin}" if self.begin else "")

    @cached_property
    def _starts(self) -> list[int]:
        """Where each shard begins in the stream of all, and where the last one ends."""
        return list(accumulate((shard.size for shard in self.shards), initial=0))

    @cached_property
    def _borders(self) -> np.ndarray:
        """`[N + 1]` ends of the documents, in tokens from `begin`; the first is 0.

        With millions of documents this is what takes memory, so it is made in place.
        """
        lengths = [shard.lengths() for shard in self.shards]
        ends = np.zeros(1 + sum(map(len, lengths)), np.int64)
        at = 0
        for part in lengths:
            own = ends[at + 1 : at + 1 + len(part)]
            np.cumsum(part, out=own)
            own += ends[at]
            at += len(part)
        first = int(np.searchsorted(ends, self.begin, side="right")) - 1
        ends = ends[first : int(np.searchsorted(ends, self.end)) + 1]
        if len(ends) < len(ends.base) // 2:
            ends = ends.copy()
        np.clip(ends, self.begin, self.end, out=ends)
        ends -= self.begin
        empty = ends[1:] == ends[:-1]
        return ends[np.append(True, ~empty)] if empty.any() else ends

    def _stretch(self, index: int, begin: int, end: int | None) -> tuple[int, int]:
        start, stop = (int(border) for border in self._borders[index : index + 2])
        return start + begin, stop if end is None else min(start + end, stop)

    def _shard_at(self, token: int) -> int:
        return bisect.bisect_right(self._starts, token) - 1

    def _within(self, begin: int, end: int) -> list[tuple[Shard, int, int]]:
        """The shards of a stretch of this stream, and what of each."""
        begin, end = self.begin + begin, self.begin + end
        parts, number = [], self._shard_at(begin)
        while begin < end:
            start, stop = self._starts[number : number + 2]
            parts.append((self.shards[number], begin - start, min(end, stop) - start))
            begin, number = stop, number + 1
        return parts


def check_ids(ids: np.ndarray, vocab_size: int, path: Path, begin: int = 0) -> None:
    """Raise `ConfigError` where one of ids `[tokens]` is not in 0..vocab_size-1.

    `begin` is where they begin in the file, in tokens.
    """
    outside = [at for at in (int(ids.argmin()), int(ids.argmax())) if not 0 <= ids[at] < vocab_size]
    if outside:
        at = max(outside, key=lambda at: abs(int(ids[at])))
        raise ConfigError(
            f"token ids lie in 0..model.vocab_size-1, but {path} has {ids[at]} at position "
            f"{begin + at} and model.vocab_size is {vocab_size}: raise it, or use data of this "
            f"vocabulary."
        )
