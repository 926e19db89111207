"""`manifest.json` of a prepared folder, which is written when all shards are complete.

It guarantees that all ids lie in `smallest_id`..`largest_id`.
"""

from pathlib import Path

import msgspec
import numpy as np

from jaxpipe.config import ConfigError

MANIFEST = "manifest.json"
JOURNAL = "unfinished.jsonl"  # stands in for the manifest while a folder is being prepared


class HistogramBin(msgspec.Struct, frozen=True, array_like=True):
    """A bin of the histogram of document lengths."""

    up_to: int  # largest document length [tokens]
    documents: int
    tokens: int  # tokens of all documents in the bin


class ShardEntry(msgspec.Struct, frozen=True):
    """One shard: `NAME.bin`, `NAME.idx` and, where some tokens do not count, `NAME.mask`."""

    name: str
    dtype: str  # numpy dtype name of the ids
    documents: int
    tokens: int
    counted: int  # tokens that count in the loss as targets
    smallest_id: int
    largest_id: int
    digest: str  # digest of ids, lengths and mask


class TokenizerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokenizer of a prepared folder."""

    name: str  # "bytes", or the name of its file or directory; the folder has its files
    digest: str  # of what its ids depend on
    vocab_size: int
    eod: int | None  # id appended to every document
    bos: tuple[int, ...] = ()  # ids put before every document


class FolderManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `manifest.json`."""

    version: int = 1
    tokenizer: TokenizerEntry
    documents: int
    tokens: int
    counted: int  # tokens that count in the loss as targets
    longest: int  # tokens of the longest document
    smallest_id: int
    largest_id: int
    histogram: tuple[HistogramBin, ...]  # document lengths
    empty: int  # documents left out because they have no text
    bad_lines: int  # documents left out because they cannot be read
    unlearned: int = 0  # documents left out because none of their tokens counts in the loss
    origin: str  # digest of the inputs and options
    pairs: bool = False  # whether documents 2 i and 2 i + 1 are the answers of a pair
    date: str = ""  # that chat templates took for the present
    chats: int = 0  # records with messages; the folder has the chat template that wrote them
    end_of_turn: int | None = None  # id at the end of the assistant's messages, if it has such
    shards: tuple[ShardEntry, ...]


def read_manifest(folder: Path) -> FolderManifest:
    """Return the manifest of a folder; raises `ConfigError` as `find_manifest`, or without one."""
    if manifest := find_manifest(folder):
        return manifest
    raise ConfigError(
        f"{folder} has no {MANIFEST}: give a folder that `python -m jaxpipe.data prepare` wrote."
    )


def find_manifest(folder: Path) -> FolderManifest | None:
    """Return the manifest of a folder, or None where the folder was never prepared.

    Raises `ConfigError` for a folder whose preparation is incomplete, and for a faulty manifest.
    """
    path = folder / MANIFEST
    if not path.exists():
        if (folder / JOURNAL).exists():
            raise ConfigError(
                f"{folder} is not prepared to its end: give the command that began it again, and "
                f"it goes on."
            )
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=FolderManifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged or of another version ({error}): prepare the folder again."
        ) from error


def bin_ends(lengths: np.ndarray) -> np.ndarray:
    """Return the `up_to` of the bin that each length, an integer > 0, belongs to.

    Bins end at k * 2^n tokens with k from 4 to 7, so a bin's width is at most 1/4 of its start.

    >>> bin_ends(np.array([1, 8, 9, 100, 1000, 1025]))
    array([   1,    8,   10,  112, 1024, 1280])
    """
    power = np.maximum(np.frexp(lengths - 1)[1] - 3, 0).astype(np.int64)
    return -(-lengths // (1 << power)) << power


def build_histogram(lengths: np.ndarray) -> tuple[HistogramBin, ...]:
    """Return the histogram of document lengths, integers `[documents]` > 0, in rising order."""
    ends, which, counts = np.unique(bin_ends(lengths), return_inverse=True, return_counts=True)
    tokens = np.bincount(which, lengths).astype(np.int64)
    return tuple(HistogramBin(*map(int, bar)) for bar in zip(ends, counts, tokens))


def merge_histograms(histograms: list[tuple[HistogramBin, ...]]) -> tuple[HistogramBin, ...]:
    """Return the sum of several histograms."""
    bars: dict[int, HistogramBin] = {}
    for bar in (bar for bars_of_one in histograms for bar in bars_of_one):
        before = bars.get(bar.up_to, HistogramBin(bar.up_to, 0, 0))
        bars[bar.up_to] = HistogramBin(
            bar.up_to, before.documents + bar.documents, before.tokens + bar.tokens
        )
    return tuple(bars[up_to] for up_to in sorted(bars))
