"""Place the actions of a schedule into a grid of ticks x ranks.

The scan that runs a schedule executes in lockstep: all ranks run the same ticks, one after the
other. `scan.py` computes how long they wait for each other. A cell has at most one F, at most one R
and at most one B, W or BW. The result of an action in tick t can be read on another rank from tick
t + transfer_ticks on; on the same rank from the next tick on, or by the gradient action of the same
cell, since F runs first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Costs:
    """Times of the ops, all in the same unit; the default is a backward of twice the forward.

    Attributes:
      F, B, W: time of an op, one number for all stages or a sequence with one per stage. BW takes
        B + W.
      transfer: time of one message between pipeline ranks.
      pair: time of an F and an unsplit BW that overlap in one cell; None: the sum of their times.
      exchange: the part of the ops' times, in the same unit, spent in collectives over mesh axes
        other than pp. In a cell with two stages, the collectives of one action overlap with the
        compute of the other.
      U: time of an optimizer update of a stage.
      R: time of a recomputation ahead of B, which B then does not take.
    """

    F: float | Sequence[float] = 1.0
    B: float | Sequence[float] = 1.0
    W: float | Sequence[float] = 1.0
    transfer: float = 0.0
    pair: float | None = None
    exchange: "Costs | None" = None
    U: float | Sequence[float] = 0.0
    R: float | Sequence[float] = 0.0

    def action_time(self, action: Action) -> float:
        """Return the time of one action."""

        def pick(cost: float | Sequence[float]) -> float:
            return cost if isinstance(cost, float | int) else cost[action.stage]

        match action.op:
            case Op.F:
                return pick(self.F)
            case Op.B:
                return pick(self.B)
            case Op.W:
                return pick(self.W)
            case Op.BW:
                return pick(self.B) + pick(self.W)
            case Op.U:
                return pick(self.U)
            case Op.R:
                return pick(self.R)

    def cell_time(self, cell: Cell) -> float:
        """Return the time of a cell."""
        overlaps = cell.forward and cell.gradient and cell.gradient.op is Op.BW
        if self.pair is not None and overlaps:
            others = filter(None, (cell.update, cell.recompute))
            return self.pair + sum(map(self.action_time, others))
        return sum(map(self.action_time, cell.actions)) - self._hidden_time(cell)

    def _hidden_time(self, cell: Cell) -> float:
        """Return the time of collectives of one action that overlap with compute of the other.

        >>> costs = Costs(F=2.0, B=2.0, W=2.0, exchange=Costs(F=1.0, B=0.5, W=0.0))
        >>> forward = Action(Op.F, 0, 3)
        >>> [costs.cell_time(Cell(forward, Action(Op.BW, stage, 1))) for stage in (1, 0)]
        [4.5, 6.0]
        """
        forward, gradient, exchange = cell.forward, cell.gradient, self.exchange
        if not (exchange and forward and gradient) or forward.stage == gradient.stage:
            return 0.0
        (of_f, f), (of_g, g) = (
            (exchange.action_time(half), self.action_time(half) - exchange.action_time(half))
            for half in (forward, gradient)
        )
        return min(of_f, g) + min(of_g, f)


def memoize_cell_time(costs: Costs) -> Callable[[Cell], float]:
    """Return a memoized `costs.cell_time`, which ignores microbatches."""
    times: dict[tuple[tuple[Op, int] | None, ...], float] = {}

    def cell_time(cell: Cell) -> float:
        key = tuple(action and action[:2] for action in cell)
        if key not in times:
            times[key] = costs.cell_time(cell)
        return times[key]

    return cell_time


@dataclass(frozen=True)
class MemoryCosts:
    """Change of a rank's memory by each op of one stage and microbatch, in any one unit.

    F allocates, and B and W free (negative numbers). B is positive where its W stash is larger than
    the residuals that it frees. `state` is the size of the state that the slices of a sequence
    share in a stage, live from the first F to the last B; its gradient has the same size and is
    live from the first B to the last.
    """

    F: float = 1.0
    B: float = 0.0
    W: float = -1.0
    state: float = 0.0

    @property
    def b_growth(self) -> float:
        """Memory that must be free for a B to run."""
        return max(0.0, self.B)


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
