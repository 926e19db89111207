"""Documents of token ids in a fixed order, and the stream of tokens that they form together.

A source has one or more shards; a shard is a file. Opening a source reads headers and footers only,
so it takes time in the number of shards, not of tokens.
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


class TokenShard(Protocol):
    """A file of documents; a file without document boundaries is one document."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    @property
    def digest(self) -> str:
        """A digest of the content."""

    @property
    def whole_digest(self) -> Callable[[], str] | None:
        """What computes a digest of all bytes, where `digest` covers a sample; else None."""

    @property
    def vouched(self) -> bool:
        """Whether its ids are known to be in the vocabulary."""

    @property
    def masked(self) -> bool:
        """Whether it has a loss mask."""

    def lengths(self) -> np.ndarray:
        """Return the tokens of every document, integers `[documents]`."""

    def document_start(self, token: int) -> int:
        """Return the first token of the document that contains this token."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the ids of the tokens from `begin` to `end`, integers `[end - begin]`."""

    def counted(self, begin: int, end: int) -> np.ndarray | None:
        """Return which of these tokens count in the loss, bool `[end - begin]`; None: all."""


@dataclass(frozen=True)
class ShardedDocuments:
    """The documents of several shards, or of a range of the token stream that they form.

    Attributes:
      shards: files in order.
      vocab_size: ids must be below it.
      begin, end: the range, in tokens of the stream of all shards.
      place: path of the source, for messages.
      tokenizer: digest of the tokenizer, if known.
    """

    shards: Sequence[TokenShard]
    vocab_size: int
    begin: int
    end: int
    place: str
    tokenizer: str = ""

    def __len__(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    @cached_property
    def fingerprint(self) -> str:
        """String that identifies these documents."""
        digests = [shard.digest for shard in self.shards]
        if len(digests) > 1:
            digests = [blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()]
        return self._named(digests[0])

    @property
    def whole_fingerprint(self) -> Callable[[], str] | None:
        """Function that fingerprints the full file, where `fingerprint` uses a sampled digest."""
        digest = self.shards[0].whole_digest if len(self.shards) == 1 else None
        return digest and (lambda: self._named(digest()))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, integers `[N]`, all positive; a new array at every access."""
        starts, ends = self._borders[:-1], self._borders[1:]
        lengths = np.empty(len(ends), np.int32)
        np.subtract(ends, starts, out=lengths, casting="same_kind")
        return lengths if lengths.sum(dtype=np.int64) == len(self) else ends - starts

    def tokens(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return the ids of a document from `begin` to `end`, int32 `[tokens]`."""
        return self.stream(*self._window(index, begin, end))

    def counted(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray | None:
        """Return which of these tokens count in the loss, bool `[tokens]`; None: all."""
        return self.counted_in_stream(*self._window(index, begin, end))

    def stream(self, begin: int, end: int) -> np.ndarray:
        """Return the ids from `begin` to `end` across document boundaries, int32 `[tokens]`.

        Raises `ConfigError` with file and offset where an id is outside the vocabulary.
        """
        parts = []
        for shard, first, last in self._within(begin, end):
            ids = shard.read(first, last)
            if not shard.vouched:
                check_ids(ids, self.vocab_size, shard.path, first)
            parts.append(ids.astype(np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def counted_in_stream(self, begin: int, end: int) -> np.ndarray | None:
        """Return which tokens from `begin` to `end` count in the loss; None: all."""
        parts = [
            (shard.counted(first, last), last - first)
            for shard, first, last in self._within(begin, end)
        ]
        if all(counted is None for counted, _ in parts):
            return None
        return np.concatenate([np.ones(n, bool) if c is None else c for c, n in parts])

    def in_shards(self, index: int) -> list[tuple[TokenShard, int, int]]:
        """Return the shards with a part of a document, each with the range of tokens there."""
        return self._within(*self._window(index, 0, None))

    def split(
        self, fraction: float, together: int = 1
    ) -> tuple["ShardedDocuments", "ShardedDocuments"]:
        """Split off the last `fraction` of the tokens; no document is in both results.

        The document at the split point goes to the second result as a whole, with those of its
        `together` consecutive documents, unless it is the very first document, which is divided.

        Raises `ConfigError` where that would divide the first `together` documents.
        """
        cut = self.end - round(fraction * len(self))
        number = self._shard_at(min(cut, self.end - 1))
        base = self._starts[number]
        border = base + self.shards[number].document_start(min(cut, self.end - 1) - base)
        if together > 1:
            starts = self._borders[:-1:together] + self.begin
            border = int(starts[np.searchsorted(starts, border, side="right") - 1])
            if cut < self.end and border == self.begin:
                raise ConfigError(
                    f"data.heldout_fraction={fraction} of {self.place} begins in its first "
                    f"{together} documents, which stay together: give more data, or set "
                    f"data.heldout_path."
                )
        if cut < self.end and border > self.begin:
            cut = border
        first, second = f"{self.place}[:{cut}]", f"{self.place}[{cut}:]"
        return replace(self, end=cut, place=first), replace(self, begin=cut, place=second)

    def _named(self, digest: str) -> str:
        """Extend a digest of the files by the range of tokens."""
        return f"{digest} tokens={len(self)}" + (f" from={self.begin}" if self.begin else "")

    @cached_property
    def _starts(self) -> list[int]:
        """Offset of each shard in the stream of all shards, and the end of the last one."""
        return list(accumulate((shard.size for shard in self.shards), initial=0))

    @cached_property
    def _borders(self) -> np.ndarray:
        """Document boundaries, int64 `[N + 1]`, in tokens from `begin`; the first is 0.

        The array dominates memory with millions of documents, so it is computed in place.
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
        within = ends[first : int(np.searchsorted(ends, self.end)) + 1]
        ends = within.copy() if len(within) < len(ends) // 2 else within
        np.clip(ends, self.begin, self.end, out=ends)
        ends -= self.begin
        empty = ends[1:] == ends[:-1]
        return ends[np.append(True, ~empty)] if empty.any() else ends

    def _window(self, index: int, begin: int, end: int | None) -> tuple[int, int]:
        start, stop = (int(border) for border in self._borders[index : index + 2])
        return start + begin, stop if end is None else min(start + end, stop)

    def _shard_at(self, token: int) -> int:
        return bisect.bisect_right(self._starts, token) - 1

    def _within(self, begin: int, end: int) -> list[tuple[TokenShard, int, int]]:
        """Return the shards that overlap a range of this stream, and the range in each shard."""
        begin, end = self.begin + begin, self.begin + end
        parts, number = [], self._shard_at(begin)
        while begin < end:
            start, stop = self._starts[number : number + 2]
            parts.append((self.shards[number], begin - start, min(end, stop) - start))
            begin, number = stop, number + 1
        return parts


def check_ids(ids: np.ndarray, vocab_size: int, path: Path, begin: int = 0) -> None:
    """Raise `ConfigError` where one of ids `[tokens]` is not in 0..vocab_size-1.

    `begin` is the position of the first id in the file, for the message.
    """
    outside = [at for at in (int(ids.argmin()), int(ids.argmax())) if not 0 <= ids[at] < vocab_size]
    if outside:
        at = max(outside, key=lambda at: abs(int(ids[at])))
        raise ConfigError(
            f"token ids lie in 0..model.vocab_size-1, but {path} has {ids[at]} at position "
            f"{begin + at} and model.vocab_size is {vocab_size}: raise it, or use data of this "
            f"vocabulary."
        )
