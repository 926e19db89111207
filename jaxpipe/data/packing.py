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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import numpy as np

_BLOCK = 1 << 18  # documents that `in_order` looks at together


class Piece(NamedTuple):
    """So many slots of a document from slot `begin` on, `slots + 1` of its tokens."""

    document: int
    begin: int
    slots: int


class Rows(Protocol):
    """R rows, each of some of the packed documents.

    Attributes:
      numbers: the number of each among all rows, rising; full pieces have those between.
    """

    numbers: Sequence[int]

    def members(self, row: int) -> Sequence[int]:
        """Which of the packed documents, counted from 0, are in a row."""


@dataclass(frozen=True)
class Packing:
    """All rows: which pieces of which documents each has.

    Attributes:
      seq_len: L, slots of a row.
      slots: of each document, int32 `[N]`.
      wholes: full pieces of all documents up to this one, int64 `[N]`.
      packed: the documents that have a rest, int32, as `rows` counts them.
    """

    seq_len: int
    slots: np.ndarray
    wholes: np.ndarray
    packed: np.ndarray
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.numbers) + (int(self.wholes[-1]) if len(self.wholes) else 0)

    def pieces(self, number: int) -> list[Piece]:
        """What row `number` of 0..len-1 has, in order."""
        row = bisect.bisect_left(self.rows.numbers, number)
        if row < len(self.rows.numbers) and self.rows.numbers[row] == number:
            documents = [int(self.packed[member]) for member in self.rows.members(row)]
            rests = [int(self.slots[document]) % self.seq_len for document in documents]
            starts = [int(self.slots[document]) - rest for document, rest in zip(documents, rests)]
            return list(map(Piece, documents, starts, rests))
        whole = number - row
        document = int(np.searchsorted(self.wholes, whole, side="right"))
        before = int(self.wholes[document - 1]) if document else 0
        return [Piece(document, (whole - before) * self.seq_len, self.seq_len)]


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
    [[(1, 0, 5)], [(1, 5, 5)], [(2, 0, 2), (0, 0, 3)], [(1, 10, 1), (3, 0, 3)]]
    """
    slots = np.maximum(lengths, 1).astype(np.int32)
    slots -= 1
    if how == "best_fit":
        packed, counts = _by_slots(slots % seq_len, np.random.default_rng(seed))
        rows: Rows = best_fit(counts, seq_len, most, first=int((slots // seq_len).sum()))
        return Packing(seq_len, slots, _wholes(slots, seq_len), packed, rows)
    packed = np.flatnonzero(slots % seq_len).astype(np.int32)
    starts, wholes = in_order(slots[packed] % seq_len, seq_len, most), _wholes(slots, seq_len)
    last = packed[starts[1:] - 1]
    rows = InOrder(np.arange(len(last)) + wholes[last], starts)
    return Packing(seq_len, slots, wholes, packed, rows)


def _wholes(slots: np.ndarray, seq_len: int) -> np.ndarray:
    return np.cumsum(slots // seq_len, dtype=np.int64)


def _by_slots(rests: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Those with a rest, by its slots and among equals shuffled; and how many have so many."""
    shuffled = random.permutation(np.arange(len(rests), dtype=np.int32))
    rests = rests[shuffled]
    counts = np.bincount(rests)
    if len(counts) <= 1 << 16:
        rests = rests.astype(np.uint16)  # which numpy sorts in linear time
    shuffled = shuffled[np.argsort(rests, kind="stable")][counts[:1].sum() :]
    counts[:1] = 0
    return shuffled, counts


@dataclass(frozen=True)
class InOrder:
    """Rows of documents that follow each other; row r begins with document `starts[r]`."""

    numbers: np.ndarray
    starts: np.ndarray

    def members(self, row: int) -> range:
        """Which of the packed documents are in a row."""
        return range(int(self.starts[row]), int(self.starts[row + 1]))


def in_order(slots: np.ndarray, seq_len: int, most: int) -> np.ndarray:
    """Where rows begin, and the last ends: each has documents until one does not fit.

    >>> in_order(np.array([3, 2, 1, 4, 5]), 5, most=9)
    array([0, 2, 4, 5])
    """
    ends = np.cumsum(slots, dtype=np.int64)
    starts, at = [], 0
    for begin in range(0, len(slots), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        room = np.searchsorted(ends, ends[block] - slots[block] + seq_len, side="right")
        after = np.minimum(room, np.arange(begin, begin + len(room)) + most).tolist()
        while at < begin + len(after):
            starts.append(at)
            at = after[at - begin]
    return np.array([*starts, len(slots)])


class _Group(NamedTuple):
    """Rows that are filled alike: with the documents `node` says from its instance `first` on."""

    rows: int
    held: int  # documents of each
    node: int = -1  # the newest of these; -1: none
    first: int = 0


@dataclass(frozen=True)
class BestFit:
    """Rows in groups that are filled alike. The documents are counted in the order of their slots.

    A node is one document of every row of a group: instance i is document `position + i`, and
    beside it the row has what instance `shift + i` of the node `below` has.
    """

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

    def members(self, row: int) -> list[int]:
        """Which of the packed documents are in a row, the shortest first."""
        number = bisect.bisect_right(self.ends, row)
        group = self.groups[number]
        instance = row - (self.ends[number] - group.rows) + group.first
        node, found = group.node, []
        while node >= 0:
            found.append(self.position[node] + instance)
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


def best_fit(counts: np.ndarray, seq_len: int, most: int, first: int = 0) -> BestFit:
    """Pack documents, of which `counts[s]` have s slots; rows are numbered from `first` on."""
    made = BestFit(first)
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
