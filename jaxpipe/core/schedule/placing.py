"""Place the actions of a schedule into a grid of ticks x ranks.

The scan that runs a schedule executes in lockstep: all ranks run the same ticks, one after the
other. `scan.py` computes how long they wait for each other. A cell has at most one F, at most one R
and at most one B, W or BW. The result of an action in tick t can be read on another rank from tick
t + transfer_ticks on; on the same rank from the next tick on, or by the gradient action of the same
cell, since F runs first.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpipe.core.schedule.action import Action, Cell, Op, Schedule, ScheduleError
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.topological_order import (
    cell_kinds,
    numbered_values,
    sort_topologically,
)

NEVER = float("inf")
Grid = tuple[tuple[Cell, ...], ...]  # [tick][rank]
_EMPTY = Cell()


class PlacedCells(NamedTuple):
    """The cells of a schedule in ticks.

    Attributes:
      ticks, ranks: of every cell.
      kinds: of every cell, an index into `examples`. Cells of a kind run the same ops of the same
        stages, so they take as long.
      examples: a cell of each kind.
      cells: all of them; entry i of every list but `examples` is of cell i, in topological order.
    """

    ticks: Sequence[int]
    ranks: np.ndarray
    kinds: np.ndarray
    examples: Sequence[Cell]
    cells: Sequence[Cell]

    @property
    def tick_count(self) -> int:
        """Number of ticks."""
        return 1 + max(self.ticks)


@lru_cache(maxsize=64)  # a schedule is simulated, lowered and drawn
def place(schedule: Schedule, lockstep: Lockstep = PLAIN) -> Grid:
    """Return the grid `[tick][rank]`, every cell in the first tick its order and inputs allow.

    Raises `ScheduleError` for a deadlock, and for a schedule with R that is not placed in order.
    """
    placed = place_cells(schedule, lockstep)
    grid = [[_EMPTY] * schedule.pp for _ in range(placed.tick_count)]
    for tick, rank, cell in zip(placed.ticks, placed.ranks.tolist(), placed.cells):
        grid[tick][rank] = cell
    return tuple(map(tuple, grid))


@lru_cache(maxsize=64)
def place_cells(schedule: Schedule, lockstep: Lockstep = PLAIN) -> PlacedCells:
    """Return the cells with their ticks; raises as `place` does."""
    return (_place_in_order if lockstep.in_flight is None else _place_ahead)(schedule, lockstep)


def _place_in_order(schedule: Schedule, lockstep: Lockstep) -> PlacedCells:
    """Place the cells of each rank strictly in its order."""
    line, (kinds, examples) = sort_topologically(schedule), cell_kinds(schedule)
    period, hop = lockstep.every * lockstep.phases, lockstep.transfer_ticks
    every = [
        [lockstep.next_allowed_tick(cell, schedule.placement, t) - t for t in range(period)]
        for cell in examples
    ]
    # Ticks until a cell of a kind is allowed, by tick modulo the period; None: it always is.
    waits = [of if any(of) else None for of in every]
    ticks: list[int] = []
    free = [0] * schedule.pp  # first tick after the last placed cell of each rank
    for (rank, _, before), kind in zip(line, kinds):
        tick = free[rank]
        for other in before:
            arrives = ticks[other] + hop
            if arrives > tick:
                tick = arrives
        if wait := waits[kind]:
            tick += wait[tick % period]
        ticks.append(tick)
        free[rank] = tick + 1
    ranks, numbers, cells = _columns(schedule)
    return PlacedCells(ticks, ranks, numbers, examples, cells)


@lru_cache(maxsize=32)  # a schedule is placed at several paces
def _columns(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, tuple[Cell, ...]]:
    """The rank, kind and cell of every place in topological order."""
    ranks, cells, _ = zip(*sort_topologically(schedule))
    return np.array(ranks), np.array(cell_kinds(schedule)[0]), cells


def _place_ahead(schedule: Schedule, lockstep: Lockstep) -> PlacedCells:
    """Place forwards ahead of the order, with at most `in_flight` live microbatches per rank."""
    in_flight = lockstep.in_flight
    if schedule.recomputes:
        raise ScheduleError(
            f"in_flight={in_flight}: {schedule.name} has R, whose position in the order of a rank "
            f"says when it runs; give no in_flight."
        )
    # The tick of every value that was computed, by number.
    computed: list[float] = [NEVER] * (2 * schedule.stages * schedule.microbatches)
    queues = [_RankQueues(schedule, rank, lockstep) for rank in range(schedule.pp)]
    cells: list[tuple[int, int, Cell, Hashable]] = []
    tick = idle = 0
    while not all(queue.is_empty for queue in queues):
        taken = [queue.take(tick, computed) for queue in queues]
        idle += 1
        for rank, (forward, gradient) in enumerate(taken):
            if not (forward or gradient):
                continue
            idle = 0
            for item in filter(None, (forward, gradient)):
                for value in item.produced:
                    computed[value] = tick
            cell = Cell(
                forward and forward.action,
                gradient and gradient.action,
                gradient and gradient.update,
            )
            cells.append((tick, rank, cell, (forward and forward.kind, gradient and gradient.kind)))
        if idle > lockstep.transfer_ticks + lockstep.every * lockstep.phases:
            raise ScheduleError(
                f"deadlock at tick {tick}: no rank of {schedule.name} can go on with "
                f"in_flight={in_flight}: raise it."
            )
        tick += 1
    examples = {kind: cell for _, _, cell, kind in cells}
    numbers = {kind: number for number, kind in enumerate(examples)}
    ticks, ranks, placed, kinds = zip(*cells)
    of_kinds = np.array([numbers[kind] for kind in kinds])
    return PlacedCells(ticks, np.array(ranks), of_kinds, list(examples.values()), placed)


class _QueuedAction(NamedTuple):
    """An action in the queue of its rank.

    Attributes:
      own, received: values that it needs by number (`numbered_values`), of its rank and of others.
      produced: values that it computes.
      updates: how many updates stand before it in the order of its rank.
      update: the U of its cell.
      kind: equal for actions that take as long.
    """

    action: Action
    own: list[int]
    received: list[int]
    produced: list[int]
    updates: int
    update: Action | None
    kind: Hashable


@lru_cache(maxsize=32)  # a schedule is placed at several paces
def _queued_actions(schedule: Schedule) -> list[tuple[list[_QueuedAction], list[_QueuedAction]]]:
    """The forwards and the gradients of every rank, in order."""
    placement, microbatches = schedule.placement, schedule.microbatches

    def queued(rank: int, action: Action, update: Action | None, updates: int) -> _QueuedAction:
        ((_, needed, produced),) = numbered_values((Cell.from_action(action),), schedule)
        own: list[int] = []
        received: list[int] = []
        for value in needed:
            stage, microbatch = divmod(value, microbatches)
            is_own = placement.rank(stage % schedule.stages, microbatch) == rank
            (own if is_own else received).append(value)
        kind = action.op, action.stage, placement.is_mirrored(action.microbatch), update is None
        return _QueuedAction(action, own, received, produced, updates, update, kind)

    queues = []
    for rank, cells in enumerate(schedule.ranks):
        forwards: list[_QueuedAction] = []
        gradients: list[_QueuedAction] = []
        updates = 0
        for cell in cells:
            for action, queue in ((cell.forward, forwards), (cell.gradient, gradients)):
                if action is not None:
                    queue.append(queued(rank, action, cell.update, updates))
            updates += cell.update is not None
        queues.append((forwards, gradients))
    return queues


class _RankQueues:
    """The queues of one rank: gradients, and forwards, which wait for free memory and updates."""

    def __init__(self, schedule: Schedule, rank: int, lockstep: Lockstep):
        self._room, self._hop = lockstep.in_flight or 0, lockstep.transfer_ticks
        self._period = lockstep.every * lockstep.phases
        # The last stage's y, by number; the loss of a shared vocabulary comes a tick after its F.
        self._late = (
            (schedule.stages - 1) * schedule.microbatches if lockstep.vocab_parallel else NEVER
        )
        self._updates = self._f = self._g = 0
        self._forwards, self._gradients = _queued_actions(schedule)[rank]
        examples = {item.kind: item.action for item in (*self._forwards, *self._gradients)}
        # Whether the lockstep allows actions of a kind, by tick modulo the period.
        self._allowed = {
            kind: [lockstep.allows(one, schedule.placement, t) for t in range(self._period)]
            for kind, one in examples.items()
        }

    @property
    def is_empty(self) -> bool:
        return self._f == len(self._forwards) and self._g == len(self._gradients)

    def take(
        self, tick: int, computed: list[float]
    ) -> tuple[_QueuedAction | None, _QueuedAction | None]:
        """Return the next forward within the limit, and the next gradient, that are ready.

        Both share a cell only where transfers take one tick; else the gradient goes first.
        """
        forward = gradient = None
        in_cell = -1  # a value that the forward of this cell computes
        if self._f < len(self._forwards) and self._room > 0:
            item = self._forwards[self._f]
            if item.updates <= self._updates and self._is_ready(item, tick, computed, -1):
                forward = item
                if self._hop == 1 and item.produced[0] < self._late:
                    in_cell = item.produced[0]
        if self._g < len(self._gradients):
            item = self._gradients[self._g]
            if self._is_ready(item, tick, computed, in_cell):
                gradient = item
                if self._hop > 1:
                    forward = None
        if forward:
            self._f += 1
            self._room -= 1
        if gradient:
            self._g += 1
            self._room += gradient.action.op is not Op.B
            self._updates += gradient.update is not None
        return forward, gradient

    def _is_ready(
        self, item: _QueuedAction, tick: int, computed: list[float], in_cell: int
    ) -> bool:
        for value in item.received:
            if computed[value] + self._hop > tick:
                return False
        for value in item.own:
            if value != in_cell and computed[value] >= tick:
                return False
        return self._allowed[item.kind][tick % self._period]
