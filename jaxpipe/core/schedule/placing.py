"""Place the actions of a schedule into a grid of ticks x ranks.

The scan that runs a schedule executes in lockstep: all ranks run the same ticks, one after the
other. `scan.py` computes how long they wait for each other. A cell has at most one F, at most one R
and at most one B, W or BW. The result of an action in tick t can be read on another rank from tick
t + transfer_ticks on; on the same rank from the next tick on, or by the gradient action of the same
cell, since F runs first.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate

from jaxpipe.core.schedule.action import (
    Action,
    Cell,
    Op,
    Schedule,
    ScheduleError,
    Value,
    needed_values,
    produced_value,
)
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.topological_order import sort_topologically

Grid = tuple[tuple[Cell, ...], ...]  # [tick][rank]
IsReady = Callable[
    ..., bool
]  # (action, value computed in the same cell) -> are its inputs available


@lru_cache(maxsize=256)  # a schedule is timed, simulated, lowered and drawn; a search has hundreds
def place(schedule: Schedule, lockstep: Lockstep = PLAIN) -> Grid:
    """Return the grid `[tick][rank]`, every cell in the first tick its order and inputs allow.

    Raises `ScheduleError` for a deadlock, and for a schedule with R that is not placed in order.
    """
    return (_place_in_order if lockstep.in_flight is None else _place_ahead)(schedule, lockstep)


def _place_in_order(schedule: Schedule, lockstep: Lockstep) -> Grid:
    """Place the cells of each rank strictly in its order."""
    ticks: list[int] = []
    free = [0] * schedule.pp  # first tick after the last placed cell of each rank
    line = sort_topologically(schedule)
    for rank, cell, before in line:
        tick = free[rank]
        for other in before:
            tick = max(tick, ticks[other] + lockstep.transfer_ticks)
        ticks.append(lockstep.next_allowed_tick(cell, schedule.placement, tick))
        free[rank] = ticks[-1] + 1
    empty = Cell()
    grid = [[empty] * schedule.pp for _ in range(max(free))]
    for tick, (rank, cell, _) in zip(ticks, line):
        grid[tick][rank] = cell
    return tuple(map(tuple, grid))


def _place_ahead(schedule: Schedule, lockstep: Lockstep) -> Grid:
    """Place forwards ahead of the order, with at most `in_flight` live microbatches per rank."""
    transfer_ticks, in_flight = lockstep.transfer_ticks, lockstep.in_flight or 0
    if schedule.recomputes:
        raise ScheduleError(
            f"in_flight={in_flight}: {schedule.name} has R, whose position in the order of a rank "
            f"says when it runs; give no in_flight."
        )
    queues = [_RankQueues(order, in_flight, transfer_ticks == 1) for order in schedule.ranks]
    computed: dict[Value, tuple[int, int]] = {}  # value -> (rank that computed it, tick)
    grid: list[tuple[Cell, ...]] = []
    idle = 0
    while not all(queue.is_empty for queue in queues):
        tick = len(grid)

        def ready(
            rank: int, action: Action, in_cell: Value | None = None, tick: int = tick
        ) -> bool:
            if not lockstep.allows(action, schedule.placement, tick):
                return False
            for value in needed_values(action, schedule.stages):
                source, when = computed.get(value, (rank, tick))
                hop = 1 if source == rank else transfer_ticks
                waits = lockstep.vocab_parallel and value[:2] == ("y", schedule.stages - 1)
                if (value != in_cell or waits) and when + hop > tick:
                    return False
            return True

        row = tuple(queue.take(partial(ready, rank)) for rank, queue in enumerate(queues))
        for rank, cell in enumerate(row):
            for action in cell.actions:
                if value := produced_value(action):
                    computed[value] = (rank, tick)
        idle = 0 if any(cell.actions for cell in row) else idle + 1
        if idle > transfer_ticks + lockstep.every * lockstep.phases:
            raise ScheduleError(
                f"deadlock at tick {tick}: no rank of {schedule.name} can go on with "
                f"in_flight={in_flight}: raise it."
            )
        grid.append(row)
    return tuple(grid)


class _RankQueues:
    """The queues of one rank: gradients, and forwards, which wait for free memory and updates."""

    def __init__(self, cells: Sequence[Cell], in_flight: int, pairs: bool):
        self._forwards = [cell.forward for cell in cells if cell.forward]
        self._gradients = [(cell.gradient, cell.update) for cell in cells if cell.gradient]
        counts = accumulate((cell.update is not None for cell in cells), initial=0)
        self._updates_before = [count for cell, count in zip(cells, counts) if cell.forward]
        self._updates = 0
        self._room, self._pairs = in_flight, pairs
        self._f = self._g = 0

    @property
    def is_empty(self) -> bool:
        return self._f == len(self._forwards) and self._g == len(self._gradients)

    def take(self, ready: IsReady) -> Cell:
        """Return the next cell: a ready gradient, else a forward within the limit, or both.

        Both share a cell only where transfers take one tick.
        """
        forward = gradient = update = None
        if self._f < len(self._forwards) and self._room > 0:
            updated = self._updates >= self._updates_before[self._f]
            if updated and ready(self._forwards[self._f]):
                forward = self._forwards[self._f]
        in_cell = produced_value(forward) if forward and self._pairs else None
        if self._g < len(self._gradients) and ready(self._gradients[self._g][0], in_cell):
            gradient, update = self._gradients[self._g]
        if gradient and not self._pairs:
            forward = None
        self._f += forward is not None
        self._g += gradient is not None
        frees = gradient is not None and gradient.op is not Op.B
        self._room += frees - (forward is not None)
        self._updates += update is not None
        return Cell(forward, gradient, update)
