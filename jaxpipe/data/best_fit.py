"""Documents into rows by their lengths, the longest first, all documents of one length at once.

The attention of a row grows with the sum of squares of its documents. Best-fit decreasing puts the
longest documents together, in few rows that cost far more than others. A `SquaresLimit` gives
such rows fewer of them, and shorter documents instead.

It also leaves the shortest documents to the end, for rows of their own, which are not full where a
row may not have enough documents. Worst-fit decreasing gives all rows some of them.
"""

import bisect
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

import numpy as np


class _RowGroup(NamedTuple):
    """Rows with the same lengths of documents, in a linked list of nodes (see `GroupedRows`)."""

    rows: int
    held: int  # documents in each row
    squares: int = 0  # sum of squares of the slots of each row's documents
    node: int = -1  # the node added last; -1: none
    first: int = 0  # the instance of `node` in the group's first row


@dataclass(frozen=True)
class GroupedRows:
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
        """Return the documents of a row, the one placed last first."""
        number = bisect.bisect_right(self.ends, row)
        group = self.groups[number]
        instance = row - (self.ends[number] - group.rows) + group.first
        node, documents = group.node, []
        while node >= 0:
            documents.append(int(self.by_slots[self.position[node] + instance]))
            node, instance = self.below[node], self.shift[node] + instance
        return documents

    def stacked(
        self, group: _RowGroup, rows: int, each: int, position: int, slots: int
    ) -> _RowGroup:
        """Add `each` documents, from `by_slots[position]` on, to a group's first `rows` rows."""
        node, shift = group.node, group.first
        for _ in range(each):
            self.position.append(position)
            self.below.append(node)
            self.shift.append(shift)
            node, shift = len(self.position) - 1, 0
            position += rows
        return _RowGroup(rows, group.held + each, group.squares + each * slots**2, node)


class SquaresLimit(NamedTuple):
    """Bound on the sum of squares of a row's slots.

    A row takes long documents as long as documents of `usual` slots can fill the rest within the
    bound. Then it waits for documents that are short enough, so it comes close to the bound.
    `SquaresLimit(L**2)` bounds nothing.

    Attributes:
      squares: the bound.
      usual: slots of a document that is short enough to fill rows, of which there are many.
    """

    squares: int
    usual: int = 0

    @classmethod
    def from_lengths(cls, counts: np.ndarray) -> "SquaresLimit":
        """Return the bound for remainders (see `pack_best_fit`), of which there is one at least.

        It is twice the mean over rows, or what the longest document's row has if the shortest
        documents fill it, if this is more. A tenth of all slots is in documents up to `usual`.
        """
        seq_len, slots = len(counts), np.arange(len(counts))
        up_to = np.cumsum(counts * slots)  # slots of the documents up to each length
        total, longest = int(up_to[-1]), int(np.flatnonzero(counts)[-1])
        shortest, usual = np.searchsorted(up_to, [min(seq_len, total), total // 10]).tolist()
        mean = int((counts * slots**2).sum()) * seq_len // total
        return cls(max(2 * mean, longest**2 + (seq_len - longest) * shortest), usual)

    def longest(self, group: _RowGroup, room: int) -> int:
        """Return the slots of the longest document for rows with `room` free slots."""
        left = self.squares - group.squares
        if left < room * self.usual:
            return left // room
        return (self.usual + isqrt(self.usual**2 + 4 * (left - room * self.usual))) // 2

    def most(self, group: _RowGroup, room: int, slots: int) -> int:
        """Return the number of documents of `slots` slots for rows with `room` free slots."""
        if slots <= self.usual:
            return room // slots
        left = self.squares - group.squares - room * self.usual
        return max(min(room // slots, left // (slots * (slots - self.usual))), 1)


def pack_best_fit(
    counts: np.ndarray,
    most: int,
    by_slots: np.ndarray,
    first: int,
    *,
    limit: SquaresLimit | None = None,
) -> GroupedRows:
    """Pack remainders by best-fit decreasing.

    Args:
      counts: number of remainders by their slots, integers `[seq_len]`.
      most: largest number of documents in a row.
      by_slots: documents sorted by the slots of their remainder.
      first: index of the first row.
      limit: bound on the sum of squares of a row.
    """
    seq_len, made = len(counts), GroupedRows(by_slots, first)
    limit = limit or SquaresLimit(seq_len**2)
    waiting: list[tuple[int, int, int, _RowGroup]] = []  # groups by the document they wait for
    open_: dict[int, list[_RowGroup]] = {}  # groups by the free slots of their rows
    free = 0  # bit c is set where a group has c free slots
    positions = np.cumsum(counts) - counts
    for slots in np.flatnonzero(counts)[::-1].tolist():
        position, left = int(positions[slots]), int(counts[slots])
        while waiting and -waiting[0][0] >= slots:
            *_, room, group = heappop(waiting)
            open_.setdefault(room, []).append(group)
            free |= 1 << room
        while left:
            if above := free >> slots:
                room = slots + (above & -above).bit_length() - 1
                group = open_[room].pop()
            else:
                room, group = seq_len, _RowGroup(left, 0)
            each = min(limit.most(group, room, slots), most - group.held, left)
            rows = min(group.rows, left // each)
            if group.held and rows < group.rows:
                rest = group._replace(rows=group.rows - rows, first=group.first + rows)
                open_[room].append(rest)
            elif group.held and not open_[room]:
                free ^= 1 << room
            group = made.stacked(group, rows, each, position, slots)
            position, left, room = position + rows * each, left - rows * each, room - each * slots
            if not room or group.held == most:
                made.groups.append(group)
            elif (longest := limit.longest(group, room)) < min(slots, room):
                heappush(waiting, (-longest, len(made.position), room, group))
            else:
                open_.setdefault(room, []).append(group)
                free |= 1 << room
    made.groups.extend(group for groups in open_.values() for group in groups)
    made.groups.extend(group for *_, group in waiting)
    made.ends.extend(accumulate(group.rows for group in made.groups))
    return made


def pack_worst_fit(
    counts: np.ndarray, most: int, by_slots: np.ndarray, first: int, rows: int
) -> GroupedRows:
    """Pack remainders by worst-fit decreasing: each into the row with the most free slots.

    Args:
      counts, most, by_slots, first: as in `pack_best_fit`.
      rows: to begin with; there are more if a document fits in none.
    """
    seq_len, made = len(counts), GroupedRows(by_slots, first)
    open_ = [(-seq_len, 0, _RowGroup(rows, 0))]  # a heap: the group with the most free slots first
    positions = np.cumsum(counts) - counts
    for slots in np.flatnonzero(counts)[::-1].tolist():
        position, left = int(positions[slots]), int(counts[slots])
        while left:
            room, group = seq_len, _RowGroup(-(-left // min(most, seq_len // slots)), 0)
            if open_ and -open_[0][0] >= slots:
                taken, number, group = heappop(open_)
                room = -taken
                if left < group.rows:
                    rest = group._replace(rows=group.rows - left, first=group.first + left)
                    heappush(open_, (taken, number, rest))
            added = min(group.rows, left)
            group = made.stacked(group, added, 1, position, slots)
            position, left, room = position + added, left - added, room - slots
            if not room or group.held == most:
                made.groups.append(group)
            else:
                heappush(open_, (-room, len(made.position), group))
    made.groups.extend(group for *_, group in open_ if group.held)
    made.ends.extend(accumulate(group.rows for group in made.groups))
    return made
