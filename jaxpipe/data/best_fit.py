"""Best-fit decreasing: documents into rows by their lengths, all documents of one length at once.

The attention of a row grows with the sum of squares of its documents. Best-fit decreasing puts the
longest documents together, in few rows that cost far more than others. A `SquaresLimit` gives
such rows fewer of them, and shorter documents instead.

It also leaves the shortest documents to the end, for rows of their own. Where a row may not have
enough of these to be full, they are spread over all rows first (see `ShortDocuments`).
"""

import bisect
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

import numpy as np


class _RowGroup(NamedTuple):
    """Rows with the same lengths of documents, in a linked list of nodes (see `BestFitRows`)."""

    rows: int
    held: int  # documents in each row
    squares: int = 0  # sum of squares of the slots of each row's documents
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

    def spread(self, counts: np.ndarray, short: "ShortDocuments") -> deque[tuple[int, _RowGroup]]:
        """Place short documents, equally many in all rows that get them, or one less.

        Returns:
          The free slots and the rows of each group.
        """
        position = int(counts[: short.slots + 1].sum())
        groups = deque([(len(counts), _RowGroup(short.rows, 0))] if position else ())
        for slots in reversed(range(1, short.slots + 1)):
            left = int(counts[slots])
            position -= left
            begin = position
            while left:
                room, group = groups.popleft()
                each = max(left // short.rows, 1)
                rows = min(group.rows, left // each)
                if rows < group.rows:
                    rest = group._replace(rows=group.rows - rows, first=group.first + rows)
                    groups.appendleft((room, rest))
                groups.append((room - each * slots, self.stacked(group, rows, each, begin, slots)))
                begin, left = begin + rows * each, left - rows * each
        return groups


class ShortDocuments(NamedTuple):
    """Documents to spread over rows before others are packed.

    Attributes:
      slots: of the longest of them.
      rows: over which they are spread.
    """

    slots: int = 0
    rows: int = 0

    @classmethod
    def from_lengths(cls, counts: np.ndarray, most: int) -> "ShortDocuments | None":
        """Return the fewest beside which the shortest others fill a row; None: there are none.

        The arguments are as in `pack_best_fit`. A document that does not fit beside a row's share
        is to have a row of its own.

        >>> ShortDocuments.from_lengths(np.bincount([1] * 12 + [5] * 4, minlength=8), most=4)
        ShortDocuments(slots=1, rows=4)
        >>> ShortDocuments.from_lengths(np.bincount([1] * 12 + [5] * 4, minlength=8), most=8)
        """
        seq_len, lengths = len(counts), np.flatnonzero(counts)
        held = np.append(0, np.cumsum(counts[lengths]))  # documents shorter than each length
        filled = np.append(0, np.cumsum(counts[lengths] * lengths))  # slots of these
        rows = max(-(-filled[-1] // seq_len), -(-held[-1] // most), 1)
        full = lengths * (most - -(-held[:-1] // rows)) >= seq_len - filled[:-1] / rows
        too_many = filled[1:] / rows + lengths > seq_len
        at = int(np.append(full | too_many, True).argmax())
        if not at:
            return None
        slots, share = int(lengths[at - 1]), int(filled[at] // rows)
        rows -= counts[seq_len - share :].sum()  # rows of long documents
        rows = max(rows, -(-held[-1] // most), -(-filled[at] // (seq_len - slots)))
        return cls(slots, int(min(rows, held[at])))


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
    short: ShortDocuments | None = None,
) -> BestFitRows:
    """Pack remainders by best-fit decreasing.

    Args:
      counts: number of remainders by their slots, integers `[seq_len]`.
      most: largest number of documents in a row.
      by_slots: documents sorted by the slots of their remainder.
      first: index of the first row.
      limit: bound on the sum of squares of a row.
      short: documents to spread over rows first.
    """
    seq_len, made = len(counts), BestFitRows(by_slots, first)
    limit, short = limit or SquaresLimit(seq_len**2), short or ShortDocuments()
    waiting: list[tuple[int, int, int, _RowGroup]] = []  # groups by the document they wait for
    open_: dict[int, list[_RowGroup]] = {}  # groups by the free slots of their rows
    free = 0  # bit c is set where a group has c free slots
    for room, group in made.spread(counts, short):
        if not room or group.held == most:
            made.groups.append(group)
        else:
            open_.setdefault(room, []).append(group)
            free |= 1 << room
    positions, lengths = np.cumsum(counts) - counts, np.flatnonzero(counts)
    for slots in lengths[lengths > short.slots][::-1].tolist():
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
