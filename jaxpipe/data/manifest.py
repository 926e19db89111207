"""What a folder of prepared shards holds: `manifest.json`, written when all of them are whole.

It vouches for the ids: they lie in `smallest_id`..`largest_id`.
"""

from pathlib import Path

import msgspec
import numpy as np

from jaxpipe.config import ConfigError

MANIFEST = "manifest.json"
JOURNAL = "unfinished.jsonl"  # in its place while a folder is being prepared


class Bin(msgspec.Struct, frozen=True, array_like=True):
    """A bar of the histogram of lengths."""

    up_to: int  # tokens of a document, more than the bar before
    documents: int
    tokens: int


class ShardEntry(msgspec.Struct, frozen=True):
    """One shard: `NAME.bin`, `NAME.idx` and, where not all tokens count, `NAME.mask`."""

    name: str
    dtype: str  # numpy's name of the ids' type
    documents: int
    tokens: int
    counted: int  # tokens that count in the loss as targets
    smallest_id: int
    largest_id: int
    digest: str  # of the three files


class TokenizerEntry(msgspec.Struct, frozen=True):
    """What turned text into ids."""

    name: str  # "bytes", or the file it was read from; a copy is beside the manifest
    digest: str
    vocab_size: int
    eod: int | None  # id at the end of every document


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole folder."""

    version: int = 1
    tokenizer: TokenizerEntry
    documents: int
    tokens: int
    counted: int
    longest: int  # tokens of a document
    smallest_id: int
    largest_id: int
    histogram: tuple[Bin, ...]  # of the lengths of documents
    empty: int  # documents without text, left out
    bad_lines: int  # lines that could not be read, left out
    unlearned: int = 0  # documents of which nothing counts in the loss, left out
    origin: str  # digest of the inputs and options
    shards: tuple[ShardEntry, ...]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, if it has one.

    Raises `ConfigError` for a folder that is still being prepared, and a manifest that is faulty.
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
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged or of another version ({error}): prepare the folder again."
        ) from error


def bin_ends(lengths: np.ndarray) -> np.ndarray:
    """The bar that each of some lengths, integers > 0, belongs to: its `up_to`.

    A bar ends at k * 2^n tokens, k from 4 to 7, so that it is at most a quarter of them wide.

    >>> bin_ends(np.array([1, 8, 9, 100, 1000, 1025]))
    array([   1,    8,   10,  112, 1024, 1280])
    """
    power = np.maximum(np.frexp(lengths - 1)[1] - 3, 0).astype(np.int64)
    return -(-lengths // (1 << power)) << power


def histogram(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Bars of documents' lengths, integers `[documents]` > 0, in order."""
    ends, which, counts = np.unique(bin_ends(lengths), return_inverse=True, return_counts=True)
    tokens = np.bincount(which, lengths).astype(np.int64)
    return tuple(Bin(*map(int, bar)) for bar in zip(ends, counts, tokens))


def merged(histograms: list[tuple[Bin, ...]]) -> tuple[Bin, ...]:
    """The histogram of all the documents of several."""
    bars: dict[int, Bin] = {}
    for bar in (bar for bars_of_one in histograms for bar in bars_of_one):
        before = bars.get(bar.up_to, Bin(bar.up_to, 0, 0))
        bars[bar.up_to] = Bin(
            bar.up_to, before.documents + bar.documents, before.tokens + bar.tokens
        )
    return tuple(bars[up_to] for up_to in sorted(bars))
