"""Packed rows of a step, arranged so that all microbatches take about the same time."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np


class RowBalance(NamedTuple):
    """Assigns the rows of a step to microbatches and replicas by their attention.

    Rows have equally many tokens and differ in attention, which is within documents. A group of
    rows is what one replica computes of one microbatch; groups get equal sums as far as rows allow,
    by the rule "longest processing time first" (Graham 1969), here with groups of equal size. Then
    groups are sorted, so that those that execute in the same ticks, in which all pipeline ranks
    wait for the slowest, are similar; replicas alternate in having the larger ones.

    Attributes:
      size: rows of one microbatch on one replica.
      attention_of: cost of a document's attention, by its tokens, in any unit.
    """

    size: int
    attention_of: Callable[[int], float]

    def places(self, documents: Iterable[Iterable[int]], microbatches: int) -> np.ndarray:
        """Return the row at each place of a batch, integers `[M, B]`; each row has one place.

        Args:
          documents: tokens of the documents of each of the step's M * B rows.
          microbatches: M.

        >>> RowBalance(2, lambda tokens: tokens**2).places([[8], [1] * 8, [4, 4], [6, 2]], 2)
        array([[0, 1],
               [3, 2]])
        """
        costs = [sum(map(self.attention_of, row)) for row in documents]
        full: list[tuple[float, int, list[int]]] = []
        free = [(0.0, group, []) for group in range(len(costs) // self.size)]
        heapify(free)
        for row in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            cost, group, rows = heappop(free)
            rows.append(row)
            heappush(free if len(rows) < self.size else full, (cost + costs[row], group, rows))
        groups = np.array([rows for *_, rows in sorted(full)])
        places = groups.reshape(microbatches, -1, self.size)
        places[1::2] = places[1::2, ::-1].copy()
        return places.reshape(microbatches, -1)
