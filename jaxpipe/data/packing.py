"""Packing: assign documents to rows of at most L slots (seq_len), from their lengths alone.

A document of n tokens takes n - 1 slots. Slot i has token i as input and token i + 1 as target, so
every token but the first is a target exactly once. A document of more than L slots is divided into
pieces of L slots, each a row of its own, and a remainder, which is packed with other remainders. A
piece starts with the last token (a target) of the piece before it. A short document is all
remainder.

`pack_next_fit` is next-fit. `pack_best_fit` is best-fit decreasing: the longest first, each into
the fullest row that still has room. Where rows become full of documents before they are full of
tokens, `pack_worst_fit` takes its place if that takes fewer rows. All remainders of equal length
are placed in one operation, so the work grows with the number of distinct lengths, not of
documents: packing 10 million documents takes seconds and 4 bytes per document besides their
lengths. The seed shuffles documents of equal length.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple, Protocol

import numpy as np

from jaxpipe.data.best_fit import GroupedRows, SquaresLimit, pack_best_fit, pack_worst_fit

_BLOCK = 1 << 18  # documents processed at a time, which bounds the size of temporary arrays
_STRIDE = 256  # documents per entry of `Packing.full_pieces`
_SPARE_ROWS = 1.001, 1.004, 1.016  # rows that worst-fit begins with, over the fewest possible
_MORE_ROWS = 1.001  # rows of even packing over those of best-fit decreasing, at most


class PackedPiece(NamedTuple):
    """`slots` slots of a document from slot `begin` on; they cover `slots + 1` tokens."""

    document: int
    begin: int
    slots: int


class PackedRows(Protocol):
    """R rows of remainders."""

    @property
    def numbers(self) -> Sequence[int] | np.ndarray:
        """The index of each row among all rows, rising; full pieces have the other indices."""

    def documents(self, row: int) -> Sequence[int]:
        """Return the documents of a row; some may have no remainder."""


@dataclass(frozen=True)
class Packing:
    """Assignment of pieces of documents to rows.

    Attributes:
      lengths: tokens of every document, integers `[N]`.
      seq_len: L, slots of a row.
      full_pieces: cumulative number of full pieces before every 256th document and at the end,
        int64.
      rows: the rows of remainders.
      worst_fit: remainders were packed by worst-fit decreasing.
    """

    lengths: np.ndarray
    seq_len: int
    full_pieces: np.ndarray
    rows: PackedRows
    worst_fit: bool = False

    def __len__(self) -> int:
        return len(self.rows.numbers) + int(self.full_pieces[-1])

    def pieces(self, number: int) -> list[PackedPiece]:
        """Return the pieces of row `number`, 0..len-1, in order."""
        row = bisect.bisect_left(self.rows.numbers, number)
        if row < len(self.rows.numbers) and self.rows.numbers[row] == number:
            documents = list(self.rows.documents(row))
            slots = count_slots(self.lengths[documents])
            rests = slots % self.seq_len
            pieces = map(PackedPiece, documents, (slots - rests).tolist(), rests.tolist())
            return [piece for piece in pieces if piece.slots]
        whole = number - row
        at = int(np.searchsorted(self.full_pieces, whole, side="right")) - 1
        first = at * _STRIDE
        before = self.full_pieces[at] + np.cumsum(
            count_slots(self.lengths[first : first + _STRIDE]) // self.seq_len
        )
        document = int(np.searchsorted(before, whole, side="right"))
        begin = whole - int(before[document - 1] if document else self.full_pieces[at])
        return [PackedPiece(first + document, begin * self.seq_len, self.seq_len)]


def pack_documents(
    lengths: np.ndarray,
    seq_len: int,
    how: Literal["sequential", "best_fit"],
    *,
    most: int,
    seed: int = 0,
    even: bool = False,
) -> Packing:
    """Pack documents, `lengths` tokens each, integers `[N]`, with at most `most` in a row.

    `even` bounds the sum of squares of the rows of `best_fit`, and so the cost of their attention,
    unless this takes more rows or a document is longer than a row.

    >>> packing = pack_documents(np.array([4, 12, 3, 4]), 5, "best_fit", most=9)
    >>> [[tuple(piece) for piece in packing.pieces(row)] for row in range(len(packing))]
    [[(1, 0, 5)], [(1, 5, 5)], [(2, 0, 2), (3, 0, 3)], [(1, 10, 1), (0, 0, 3)]]
    """
    before = [np.zeros(1, np.int64)]
    for _, block in _iterate_blocks(lengths):
        wholes = np.add.reduceat(block // seq_len, np.arange(0, len(block), _STRIDE))
        before.append(before[-1][-1] + np.cumsum(wholes, dtype=np.int64))
    wholes = np.concatenate(before)
    if how == "sequential":
        return Packing(lengths, seq_len, wholes, pack_next_fit(lengths, seq_len, most))
    by_slots, counts = _sort_by_slots(lengths, seq_len, seed)
    first = int(wholes[-1])
    rows = pack_best_fit(counts, most, by_slots, first)
    fewer = None
    if any(group.held == most for group in rows.groups):
        fewer = _pack_fewer_rows(counts, most, by_slots, first, len(rows.numbers))
        rows = fewer or rows
    if even and not first and counts.any():  # a full piece has the square of a full row anyway
        limit = SquaresLimit.from_lengths(counts)
        evened = pack_best_fit(counts, most, by_slots, first, limit=limit)
        if len(evened.numbers) <= _MORE_ROWS * len(rows.numbers):
            rows = evened
    return Packing(lengths, seq_len, wholes, rows, worst_fit=rows is fewer)


def _pack_fewer_rows(
    counts: np.ndarray, most: int, by_slots: np.ndarray, first: int, rows: int
) -> GroupedRows | None:
    """Pack by worst-fit decreasing into fewer than `rows` rows; return None if that takes more.

    The other arguments are those of `pack_best_fit`.
    """
    fewest = max(int((counts * np.arange(len(counts))).sum()) / len(counts), counts.sum() / most)
    found = None
    for spare in _SPARE_ROWS:
        planned = ceil(spare * fewest)
        if planned >= rows:
            break
        packed = pack_worst_fit(counts, most, by_slots, first, planned)
        if len(packed.numbers) < rows:
            found, rows = packed, len(packed.numbers)
    return found


def count_slots(lengths: np.ndarray) -> np.ndarray:
    """Return the slots of documents of the given lengths; a single token has no target: 0 slots."""
    return np.maximum(lengths, 1) - 1


def _iterate_blocks(lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first document of every block, and the slots of the block's documents."""
    for begin in range(0, len(lengths), _BLOCK):
        yield begin, count_slots(np.asarray(lengths[begin : begin + _BLOCK], np.int64))


def _sort_by_slots(lengths: np.ndarray, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort documents by the slots of their remainder, in random order among equals.

    The sort keys are integers of the slots (high bits), random bits and the document (low bits).

    Returns:
      The documents with a remainder, int32, and `counts`, int64 `[seq_len]`: documents by slots.
    """
    bits, random = len(lengths).bit_length(), np.random.default_rng(seed)
    drawn = min(32, 63 - bits - seq_len.bit_length())
    keys, counts = np.empty(len(lengths), np.int64), np.zeros(seq_len, np.int64)
    for begin, slots in _iterate_blocks(lengths):
        rests, block_keys = slots % seq_len, keys[begin : begin + len(slots)]
        counts += np.bincount(rests, minlength=seq_len)
        block_keys[:] = rests << drawn | random.integers(1 << drawn, size=len(slots))
        block_keys <<= bits
        block_keys |= np.arange(begin, begin + len(slots))
    keys.sort()
    keys &= (1 << bits) - 1
    without, counts[0] = int(counts[0]), 0
    return keys[without:].astype(np.int32), counts


@dataclass(frozen=True)
class NextFitRows:
    """Rows of consecutive documents: row r has documents `starts[r]` to `starts[r + 1] - 1`."""

    numbers: np.ndarray
    starts: np.ndarray

    def documents(self, row: int) -> range:
        """Return the documents of a row."""
        return range(int(self.starts[row]), int(self.starts[row + 1]))


def pack_next_fit(lengths: np.ndarray, seq_len: int, most: int) -> NextFitRows:
    """Pack by next-fit: a row takes documents in order until one does not fit.

    >>> pack_next_fit(np.array([4, 3, 2, 5, 10]), 5, most=9).starts
    array([0, 2, 4, 5], dtype=int32)
    """
    most_rows = int(lengths.sum(dtype=np.int64)) // seq_len + len(lengths)
    kind = np.int32 if most_rows < 1 << 31 else np.int64
    # Allocate the upper bound: pages that are never written take no memory.
    starts, numbers = np.empty(len(lengths) + 1, kind), np.empty(len(lengths), kind)
    starts[:1], begin, rows, before = 0, 0, 0, 0
    while begin < len(lengths):
        slots = count_slots(np.asarray(lengths[begin : begin + _BLOCK], np.int64))
        rests = slots % seq_len
        ends = np.array(_find_row_ends(rests, seq_len, most))
        if len(ends) > 1 and begin + len(slots) < len(lengths):
            ends = ends[:-1]  # the next block may add documents to the last row
        wholes, done = np.cumsum(slots // seq_len), int(ends[-1])
        # The last document with a remainder in each row: full pieces up to this document get
        # indices before the row. Later documents of the row have full pieces only, after the row.
        last = np.maximum.accumulate(np.where(rests > 0, np.arange(len(rests)), -1))[ends - 1]
        filled = last >= np.append(0, ends[:-1])
        more = rows + int(filled.sum())
        starts[rows + 1 : more + 1] = begin + ends[filled]
        numbers[rows:more] = np.arange(rows, more) + before + wholes[last[filled]]
        rows, before, begin = more, before + int(wholes[done - 1]), begin + done
    return NextFitRows(numbers[:rows], starts[: rows + 1])


def _find_row_ends(rests: np.ndarray, seq_len: int, most: int) -> list[int]:
    """Return the exclusive end of every row, as a document of the block."""
    ends, some = np.cumsum(rests), rests > 0
    room = np.searchsorted(ends, ends - rests + seq_len, side="right")
    one_too_many = np.append(np.flatnonzero(some), len(rests))
    count = np.cumsum(some) - some + most
    after = np.minimum(room, one_too_many[np.minimum(count, len(one_too_many) - 1)]).tolist()
    row_ends, at = [], 0
    while at < len(after):
        at = after[at]
        row_ends.append(at)
    return row_ends
