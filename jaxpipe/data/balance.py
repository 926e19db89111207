"""Packed rows in an order in which all microbatches of a step take about the same time.

Packed rows have equally many tokens and differ in attention, which is within documents. A row with
one long document costs more than any row of short ones can, so rows of a step cost the same only if
they are alike: `BalancedOrder` brings such rows together. `RowBalance` then assigns the rows of a
step to microbatches and replicas.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import NamedTuple

import numpy as np

_WINDOW = 1 << 16  # most rows that are sorted at a time, which takes about a second
_RUN = 16  # most blocks of a run (see `divide`)


@dataclass(frozen=True)
class BalancedOrder:
    """An order in which rows of about equal attention follow one another, a block at a time.

    Windows of the given order are divided into blocks of rows alike (see `divide`), which come in
    random order. Every window keeps its rows. The row at a position is a function of the given
    order, the position and the attributes below, whatever the shape of a batch.

    Attributes:
      order: the order to rearrange.
      documents_of: tokens of each document of a row, by the row's number.
      size: rows of a block.
      epoch: rows of `order` before any row comes again.
      seed: of the order of blocks.
    """

    order: Sequence[int]
    documents_of: Callable[[int], Sequence[int]]
    size: int
    epoch: int
    seed: int
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> int:
        window, at = divmod(position, self.window)
        with self._lock:  # threads that read ahead reach a window together, and one sorts it
            return int(self._window_of(window)[at])

    @cached_property
    def window(self) -> int:
        """Rows of a window, a multiple of `size`.

        An epoch has a number of windows, and less than a block more for each. So a window has parts
        of two epochs at most, and each row at most twice.
        """
        windows = -(-self.epoch // _WINDOW)
        return max(self.epoch // (windows * self.size), 1) * self.size

    @cached_property
    def _window_of(self) -> Callable[[int], np.ndarray]:
        def of(window: int) -> np.ndarray:
            first = window * self.window
            rows = [self.order[at] for at in range(first, first + self.window)]
            # Squares sort rows as the attention of every model does, closely with sliding windows,
            # too, and they are integers: the order depends on no model and on no rounding.
            costs = [sum(tokens * tokens for tokens in self.documents_of(row)) for row in rows]
            blocks = np.array(rows)[divide(np.array(costs), self.size)]
            separate_copies(blocks)
            return np.random.default_rng((self.seed, window)).permutation(blocks).ravel()

        return lru_cache(maxsize=2)(of)


def divide(costs: np.ndarray, size: int) -> np.ndarray:
    """Divide rows into blocks of similar cost.

    Rows are sorted, the costliest first, and blocks take them in runs: the blocks of a run take one
    row each in turn. Most runs are one block. Where the costliest rows would leave one of them to a
    block of others, which would wait for it, a longer run gives each block some of them. Of all
    runs these have the least sum over blocks of (largest cost / mean - 1)**4 of the block's run:
    the power makes large ratios count most.

    Args:
      costs: cost of each row, positive integers `[rows]`.
      size: rows of a block, a divisor of the number of rows.

    Returns:
      The rows of each block, integers `[blocks, size]`.

    >>> divide(np.array([9, 9, 9, 5, 5, 5, 2, 2]), 2)
    array([[0, 2],
           [1, 3],
           [4, 5],
           [6, 7]])
    """
    ranked = np.argsort(-costs, kind="stable")
    sums = np.append(0, np.cumsum(costs[ranked].reshape(-1, size).sum(axis=1)))
    blocks, lengths = len(sums) - 1, np.arange(1, _RUN + 1)[:, None]
    ends = np.minimum(np.arange(blocks) + lengths, blocks)
    means = (sums[ends] - sums[:-1]) / ((ends - np.arange(blocks)) * size)
    losses = lengths * np.square(np.square(costs[ranked[::size]] / means - 1))
    least = np.append(np.zeros(blocks + 1), np.full(_RUN, np.inf))  # loss from each block on
    best = np.zeros(blocks, int)
    for at in reversed(range(blocks)):
        totals = losses[:, at] + least[at + 1 : at + 1 + _RUN]
        best[at] = totals.argmin()
        least[at] = totals[best[at]]
    divided, at = [], 0
    while at < blocks:
        end = at + 1 + int(best[at])
        divided.append(ranked[at * size : end * size].reshape(size, -1).T)
        at = end
    return np.concatenate(divided)


def separate_copies(blocks: np.ndarray) -> None:
    """Exchange rows of neighbouring blocks until no block has a row twice, as far as possible.

    Copies of a row cost the same, so `divide` puts them into the same block.

    Args:
      blocks: rows by block, integers `[blocks, size]`, changed in place.

    >>> blocks = np.array([[7, 7], [4, 3]])
    >>> separate_copies(blocks)
    >>> blocks
    array([[7, 4],
           [7, 3]])
    """
    if len(np.unique(blocks)) == blocks.size or len(blocks) == 1:
        return
    for number, block in reversed(list(enumerate(blocks))):
        # From a costlier block come its cheapest rows; the first block takes the costliest.
        beside = blocks[number - 1][::-1] if number else blocks[1]
        _, firsts = np.unique(block, return_index=True)
        for copy in np.setdiff1d(np.arange(len(block)), firsts):
            others = np.flatnonzero(~np.isin(beside, block))
            if block[copy] not in beside and len(others):
                block[copy], beside[others[0]] = beside[others[0]], block[copy]


class RowBalance(NamedTuple):
    """Assigns the rows of a step to microbatches and replicas by their attention.

    A group of rows is what one replica computes of one microbatch; groups get equal sums as far as
    rows allow, by the rule "longest processing time first" (Graham 1969), here with groups of equal
    size. Then groups are sorted, so that those that execute in the same ticks, in which all
    pipeline ranks wait for the slowest, are similar; replicas alternate in having the larger ones.

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
        free: list[tuple[float, int, list[int]]] = [
            (0.0, group, []) for group in range(len(costs) // self.size)
        ]
        heapify(free)
        for row in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            cost, group, rows = heappop(free)
            rows.append(row)
            heappush(free if len(rows) < self.size else full, (cost + costs[row], group, rows))
        groups = np.array([rows for *_, rows in sorted(full)])
        places = groups.reshape(microbatches, -1, self.size)
        places[1::2] = places[1::2, ::-1].copy()
        return places.reshape(microbatches, -1)
