"""Packing: assign documents to rows of at most L slots (seq_len), from their lengths alone.

A document of n tokens takes n - 1 slots. Slot i has token i as input and token i + 1 as target, so
every token but the first is a target exactly once. A document of more than L slots is divided into
pieces of L slots, each a row of its own, and a remainder, which is packed with other remainders. A
piece starts with the last token (a target) of the piece before it. A short document is all
remainder.

`pack_next_fit` is next-fit. `pack_best_fit` is best-fit decreasing: the longest first, each into
the fullest row that still has room. All remainders of equal length are placed in one operation, so
the work
grows with the number of distinct lengths, not of documents: packing 10 million documents takes
seconds and 4 bytes per document besides their lengths. The seed shuffles documents of equal length.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import numpy as np

_BLOCK = 1 << 18  # documents processed at a time, which bounds the size of temporary arrays
_STRIDE = 256  # documents per entry of `Packing.full_pieces`


class PackedPiece(NamedTuple):
    """`slots` slots of a document from slot `begin` on; they cover `slots + 1` tokens."""

    document: int
    begin: int
    slots: int


class PackedRows(Protocol):
    """R rows of remainders.

    Attributes:
      numbers: the index of each row among all rows, rising; full pieces have the other indices.
    """

    numbers: Sequence[int]

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
    """

    lengths: np.ndarray
    seq_len: int
    full_pieces: np.ndarray
    rows: PackedRows

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
) -> Packing:
    """Pack documents, `lengths` tokens each, integers `[N]`, with at most `most` in a row.

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
    rows = pack_best_fit(counts, seq_len, most, by_slots, first=int(wholes[-1]))
    return Packing(lengths, seq_len, wholes, rows)


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


class _RowGroup(NamedTuple):
    """Rows with the same lengths of documents, in a linked list of nodes (see `BestFitRows`)."""

    rows: int
    held: int  # documents in each row
    node: int = -1  # the node added last; -1: none
    first: int = 0  # the instance of `node` in the group's first row


@dataclass(frozen=True)
class BestFitRows:
    """Rows in groups whose rows have the same lengths of documents.

    A node adds one document to every row of a group. Its instance i is the document
    `by_slots[position + i]`, and the row of that document continues with instance `shift + i` of
    the node `below`.
    """

    by_slots: np.ndarray  # documents sorted by slots
    first: int  # index of the first row among all rows
    groups: list[_RowGroup] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # cumulative rows up to and with each group
    position: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    shift: list[int] = field(default_factory=list)

    @property
    def numbers(self) -> range:
        """Indices of the rows, after all full pieces."""
        return range(self.first, self.first + (self.ends[-1] if self.ends else 0))

    def documents(self, row: int) -> list[int]:
        """Return the documents of a row, the shortest remainder first."""
        number = bisect.bisect_right(self.ends, row)
        group = self.groups[number]
        instance = row - (self.ends[number] - group.rows) + group.first
        node, documents = group.node, []
        while node >= 0:
            documents.append(int(self.by_slots[self.position[node] + instance]))
            node, instance = self.below[node], self.shift[node] + instance
        return documents

    def stacked(self, group: _RowGroup, rows: int, each: int, position: int) -> _RowGroup:
        """Add `each` documents, from `by_slots[position]` on, to a group's first `rows` rows."""
        node, shift = group.node, group.first
        for _ in range(each):
            self.position.append(position)
            self.below.append(node)
            self.shift.append(shift)
            node, shift = len(self.position) - 1, 0
            position += rows
        return _RowGroup(rows, group.held + each, node)


def pack_best_fit(
    counts: np.ndarray, seq_len: int, most: int, by_slots: np.ndarray, first: int
) -> BestFitRows:
    """Pack remainders by best-fit decreasing.

    Args:
      counts: number of remainders by their slots, integers `[seq_len]`.
      seq_len: L, slots of a row.
      most: largest number of documents in a row.
      by_slots: documents sorted by the slots of their remainder.
      first: index of the first row.
    """
    made = BestFitRows(by_slots, first)
    open_: dict[int, list[_RowGroup]] = {}  # groups by the free slots of their rows
    free = 0  # bit c is set where a group has c free slots
    positions = np.cumsum(counts) - counts
    for slots in np.flatnonzero(counts)[::-1].tolist():
        position, left = int(positions[slots]), int(counts[slots])
        while left:
            if above := free >> slots:
                room = slots + (above & -above).bit_length() - 1
                group = open_[room].pop()
            else:
                room, group = seq_len, _RowGroup(left, 0)
            each = min(room // slots, most - group.held, left)
            rows = min(group.rows, left // each)
            if group.held and rows < group.rows:
                rest = group._replace(rows=group.rows - rows, first=group.first + rows)
                open_[room].append(rest)
            elif group.held and not open_[room]:
                free ^= 1 << room
            group = made.stacked(group, rows, each, position)
            position, left, room = position + rows * each, left - rows * each, room - each * slots
            if room and group.held < most:
                open_.setdefault(room, []).append(group)
                free |= 1 << room
            else:
                made.groups.append(group)
    made.groups.extend(group for groups in open_.values() for group in groups)
    made.ends.extend(accumulate(group.rows for group in made.groups))
    return made
