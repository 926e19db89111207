"""Documents packed into rows of at most L slots (seq_len), by their lengths alone.

A document of n tokens is n - 1 slots: slot i has token i as input and token i + 1 as target, so
every token but the first is a target once, and none is an input without a target. Documents of more
than L slots are cut every L: these full pieces are rows of their own, and the rest, if there is
one, is packed with others'. A piece begins with the token that the one before it ends with.

`in_order` is next-fit. `best_fit` is best-fit decreasing: the longest first, each into the fullest
row that still has room. What has the same number of slots is placed at once, so the work grows with
the number of lengths that differ, not with that of documents, and all documents are packed
together: 10 million take seconds and 4 bytes each beside their lengths. Which of equally long
documents is where is drawn with the seed.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import numpy as np

_BLOCK = 1 << 18  # documents looked at together, so that what is made of them stays small
_STRIDE = 256  # documents between two of which the full pieces before them are known


class Piece(NamedTuple):
    """So many slots of a document from slot `begin` on, `slots + 1` of its tokens."""

    document: int
    begin: int
    slots: int


class Rows(Protocol):
    """R rows of documents' rests.

    Attributes:
      numbers: the number of each among all rows, rising; full pieces have those between.
    """

    numbers: Sequence[int]

    def documents(self, row: int) -> Sequence[int]:
        """The documents of a row; some may have no rest."""


@dataclass(frozen=True)
class Packing:
    """All rows: which pieces of which documents each has.

    Attributes:
      lengths: tokens of every document, integers `[N]`.
      seq_len: L, slots of a row.
      wholes: full pieces of all documents before every 256th, int64.
      rows: those of rests.
    """

    lengths: np.ndarray
    seq_len: int
    wholes: np.ndarray
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.numbers) + int(self.wholes[-1])

    def pieces(self, number: int) -> list[Piece]:
        """What row `number` of 0..len-1 has, in order."""
        row = bisect.bisect_left(self.rows.numbers, number)
        if row < len(self.rows.numbers) and self.rows.numbers[row] == number:
            documents = list(self.rows.documents(row))
            slots = slots_of(self.lengths[documents])
            rests = slots % self.seq_len
            pieces = map(Piece, documents, (slots - rests).tolist(), rests.tolist())
            return [piece for piece in pieces if piece.slots]
        whole = number - row
        at = int(np.searchsorted(self.wholes, whole, side="right")) - 1
        first = at * _STRIDE
        before = self.wholes[at] + np.cumsum(
            slots_of(self.lengths[first : first + _STRIDE]) // self.seq_len
        )
        document = int(np.searchsorted(before, whole, side="right"))
        begin = whole - int(before[document - 1] if document else self.wholes[at])
        return [Piece(first + document, begin * self.seq_len, self.seq_len)]


def pack(
    lengths: np.ndarray,
    seq_len: int,
    how: Literal["sequential", "best_fit"],
    *,
    most: int,
    seed: int = 0,
) -> Packing:
    """Pack documents of so many tokens each, integers `[N]`, at most `most` into a row.

    >>> packing = pack(np.array([4, 12, 3, 4]), 5, "best_fit", most=9)
    >>> [[tuple(piece) for piece in packing.pieces(row)] for row in range(len(packing))]
    [[(1, 0, 5)], [(1, 5, 5)], [(2, 0, 2), (3, 0, 3)], [(1, 10, 1), (0, 0, 3)]]
    """
    before = [np.zeros(1, np.int64)]
    for _, block in _blocks(lengths):
        wholes = np.add.reduceat(block // seq_len, np.arange(0, len(block), _STRIDE))
        before.append(before[-1][-1] + np.cumsum(wholes, dtype=np.int64))
    wholes = np.concatenate(before)
    if how == "sequential":
        return Packing(lengths, seq_len, wholes, in_order(lengths, seq_len, most))
    by_slots, counts = _by_slots(lengths, seq_len, seed)
    rows = best_fit(counts, seq_len, most, by_slots, first=int(wholes[-1]))
    return Packing(lengths, seq_len, wholes, rows)


def slots_of(lengths: np.ndarray) -> np.ndarray:
    """Of documents of so many tokens; a single token has no target and none."""
    return np.maximum(lengths, 1) - 1


def _blocks(lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The first document of every block, and the slots of all of it."""
    for begin in range(0, len(lengths), _BLOCK):
        yield begin, slots_of(np.asarray(lengths[begin : begin + _BLOCK], np.int64))


def _by_slots(lengths: np.ndarray, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents with a rest, int32, by its slots and among equals drawn; how many have so many.

    They are sorted as numbers that have the slots in front, then random bits, then the document.
    """
    bits, random = len(lengths).bit_length(), np.random.default_rng(seed)
    drawn = min(32, 63 - bits - seq_len.bit_length())
    keys, counts = np.empty(len(lengths), np.int64), np.zeros(seq_len, np.int64)
    for begin, slots in _blocks(lengths):
        rests, own = slots % seq_len, keys[begin : begin + len(slots)]
        counts += np.bincount(rests, minlength=seq_len)
        own[:] = rests << drawn | random.integers(1 << drawn, size=len(slots))
        own <<= bits
        own |= np.arange(begin, begin + len(slots))
    keys.sort()
    keys &= (1 << bits) - 1
    without, counts[0] = int(counts[0]), 0
    return keys[without:].astype(np.int32), counts


@dataclass(frozen=True)
class InOrder:
    """Rows of documents that follow each other: row r has `starts[r]` to `starts[r + 1] - 1`."""

    numbers: np.ndarray
    starts: np.ndarray

    def documents(self, row: int) -> range:
        """The documents of a row."""
        return range(int(self.starts[row]), int(self.starts[row + 1]))


def in_order(lengths: np.ndarray, seq_len: int, most: int) -> InOrder:
    """Next-fit: a row has documents until one does not fit.

    >>> in_order(np.array([4, 3, 2, 5, 10]), 5, most=9).starts
    array([0, 2, 4, 5], dtype=int32)
    """
    most_rows = int(lengths.sum(dtype=np.int64)) // seq_len + len(lengths)
    kind = np.int32 if most_rows < 1 << 31 else np.int64
    # As many as there can be: what is not written takes no memory.
    starts, numbers = np.empty(len(lengths) + 1, kind), np.empty(len(lengths), kind)
    starts[:1], begin, rows, before = 0, 0, 0, 0
    while begin < len(lengths):
        slots = slots_of(np.asarray(lengths[begin : begin + _BLOCK], np.int64))
        rests = slots % seq_len
        ends = np.array(_row_ends(rests, seq_len, most))
        if len(ends) > 1 and begin + len(slots) < len(lengths):
            ends = ends[:-1]  # the next block may have more for the last
        wholes, done = np.cumsum(slots // seq_len), int(ends[-1])
        # The last of a row that has a rest. Those after it, before the next row, have full pieces.
        last = np.maximum.accumulate(np.where(rests > 0, np.arange(len(rests)), -1))[ends - 1]
        filled = last >= np.append(0, ends[:-1])
        more = rows + int(filled.sum())
        starts[rows + 1 : more + 1] = begin + ends[filled]
        numbers[rows:more] = np.arange(rows, more) + before + wholes[last[filled]]
        rows, before, begin = more, before + int(wholes[done - 1]), begin + done
    return InOrder(numbers[:rows], starts[: rows + 1])


def _row_ends(rests: np.ndarray, seq_len: int, most: int) -> list[int]:
    """The document that every row ends before."""
    ends, some = np.cumsum(rests), rests > 0
    room = np.searchsorted(ends, ends - rests + seq_len, side="right")
    one_too_many = np.append(np.flatnonzero(some), len(rests))
    held = np.cumsum(some) - some + most
    after = np.minimum(room, one_too_many[np.minimum(held, len(one_too_many) - 1)]).tolist()
    found, at = [], 0
    while at < len(after):
        at = after[at]
        found.append(at)
    return found


class _Group(NamedTuple):
    """Rows that are filled alike: with the documents `node` says from its instance `first` on."""

    rows: int
    held: int  # documents of each
    node: int = -1  # the newest of these; -1: none
    first: int = 0


@dataclass(frozen=True)
class BestFit:
    """Rows in groups that are filled alike.

    A node is one document of every row of a group: instance i is `by_slots[position + i]`, and
    beside it the row has what instance `shift + i` of the node `below` has.
    """

    by_slots: np.ndarray  # the documents
    first: int  # number of the first row
    groups: list[_Group] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # rows of each group and those before it
    position: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    shift: list[int] = field(default_factory=list)

    @property
    def numbers(self) -> range:
        """They come after all full pieces."""
        return range(self.first, self.first + (self.ends[-1] if self.ends else 0))

    def documents(self, row: int) -> list[int]:
        """The documents of a row, those with the fewest slots first."""
        number = bisect.bisect_right(self.ends, row)
        group = self.groups[number]
        instance = row - (self.ends[number] - group.rows) + group.first
        node, found = group.node, []
        while node >= 0:
            found.append(int(self.by_slots[self.position[node] + instance]))
            node, instance = self.below[node], self.shift[node] + instance
        return found

    def stacked(self, group: _Group, rows: int, each: int, position: int) -> _Group:
        """The first so many rows of a group, with `each` more documents from `position` on."""
        node, shift = group.node, group.first
        for _ in range(each):
            self.position.append(position)
            self.below.append(node)
            self.shift.append(shift)
            node, shift = len(self.position) - 1, 0
            position += rows
        return _Group(rows, group.held + each, node)


def best_fit(
    counts: np.ndarray, seq_len: int, most: int, by_slots: np.ndarray, first: int
) -> BestFit:
    """Pack documents, of which `counts[s]` have s slots; rows are numbered from `first` on."""
    made = BestFit(by_slots, first)
    open_: dict[int, list[_Group]] = {}  # groups by the slots that are free in their rows
    free = 0  # bit c is set where there are groups with c free slots
    positions = np.cumsum(counts) - counts
    for slots in np.flatnonzero(counts)[::-1].tolist():
        position, left = int(positions[slots]), int(counts[slots])
        while left:
            if above := free >> slots:
                room = slots + (above & -above).bit_length() - 1
                group = open_[room].pop()
            else:
                room, group = seq_len, _Group(left, 0)
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
