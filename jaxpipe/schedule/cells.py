"""Which tick does what: the actions of a schedule placed into cells of a lockstep grid.

The scan that runs a schedule is a lockstep: all ranks meet once a tick, so a tick costs what its
slowest rank's cell costs. A cell holds at most one F and at most one B, W or BW. A message sent by
an action of tick t can be used from tick t + transfer_ticks on; a value that stays on its rank can
be used from the next tick on, or by the gradient half of the same cell, since F runs first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.schedule.action import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    Value,
    needed_by,
    produced_by,
)


@dataclass(frozen=True)
class Costs:
    """Times of the ops, in any one unit, of every stage or per stage; BW costs B + W.

    `transfer` is the time of one message between ranks. The default is the usual account of a
    transformer layer: backward twice the forward, in two equal halves.
    """

    F: float | Sequence[float] = 1.0
    B: float | Sequence[float] = 1.0
    W: float | Sequence[float] = 1.0
    transfer: float = 0.0

    def of(self, action: Action) -> float:
        """Time of one action."""

        def pick(cost: float | Sequence[float]) -> float:
            return cost[action.stage] if isinstance(cost, Sequence) else cost

        match action.op:
            case Op.F:
                return pick(self.F)
            case Op.B:
                return pick(self.B)
            case Op.W:
                return pick(self.W)
            case Op.BW:
                return pick(self.B) + pick(self.W)


class Cell(NamedTuple):
    """What one rank does in one tick: an F, a gradient action (B, W or BW), both, or nothing."""

    forward: Action | None = None
    gradient: Action | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions present, F first."""
        return tuple(action for action in self if action is not None)


Grid = list[list[Cell]]  # [tick][rank]


def lockstep_cost(grid: Grid, costs: Costs, transfer_ticks: int = 1) -> float:
    """Time of the whole grid when ranks meet at the transfers.

    One-tick transfers end every tick with a meeting of all: the sum over ticks of the slowest
    cell. With two ticks a rank needs at tick t only what its neighbours on the ring had sent by
    the end of tick t - 2, so it may run one cell ahead of them.
    """
    times = [[sum(map(costs.of, cell.actions)) for cell in row] for row in grid]
    if transfer_ticks == 1:
        return sum(map(max, times))
    pp = len(times[0])
    before, last = [0.0] * pp, [0.0] * pp  # ends of the two ticks past
    for row in times:
        starts = [max(last[r], before[r - 1], before[(r + 1) % pp]) for r in range(pp)]
        before, last = last, [start + time for start, time in zip(starts, row)]
    return max(last)


@dataclass
class _Line:
    """One rank's progress: its forwards and gradients in order, and how far each has come.

    `before_f[k]` is how many gradients must be done before forward k, `before_g[k]` how many
    forwards before gradient k; together they say the rank's order.
    """

    forwards: list[Action]
    gradients: list[Action]
    before_f: list[int]
    before_g: list[int]
    f: int = 0
    g: int = 0

    @property
    def finished(self) -> bool:
        return self.f == len(self.forwards) and self.g == len(self.gradients)


def _line(order: Sequence[Action], in_flight: int | None) -> _Line:
    line = _Line([], [], [], [])
    for action in order:
        if action.op is Op.F:
            line.before_f.append(len(line.gradients))
            line.forwards.append(action)
        else:
            line.before_g.append(len(line.forwards))
            line.gradients.append(action)
    if in_flight is not None:
        # Run ahead of the order: F waits only for room, a gradient only for its own F.
        forwards = len(line.forwards)
        freed = [g for g, action in enumerate(line.gradients, 1) if action.op is not Op.B]
        line.before_f = [freed[k - in_flight] if k >= in_flight else 0 for k in range(forwards)]
        line.before_g = [0] * len(line.before_g)
    return line


def place(schedule: Schedule, *, transfer_ticks: int = 1, in_flight: int | None = None) -> Grid:
    """The grid of a schedule: every action in the first tick that its order and inputs allow.

    `in_flight` None keeps each rank's order, one action a cell. A number lets every rank run
    forwards ahead of its order while it holds at most that many microbatches; with one-tick
    transfers it then also pairs an F with a gradient action in one cell, so that all ranks do the
    same work in a tick. For 1F1B, 2P - 1 wins back what the lockstep costs, and more gains nothing.

    Raises `ScheduleError` for a `transfer_ticks` other than 1 or 2, a cap below 1, or a deadlock.
    """
    if transfer_ticks not in (1, 2):
        raise ScheduleError(f"transfer_ticks={transfer_ticks}: a transfer takes 1 or 2 ticks.")
    if in_flight is not None and in_flight < 1:
        raise ScheduleError(f"in_flight={in_flight}: a rank must hold at least 1 microbatch.")
    lines = [_line(order, in_flight) for order in schedule.ranks]
    pairs = in_flight is not None and transfer_ticks == 1
    usable: dict[Value, tuple[int, int]] = {}  # value -> (rank that made it, tick)
    grid: Grid = []
    while not all(line.finished for line in lines):
        tick = len(grid)

        def ready(
            action: Action, rank: int, same_cell: Value | None = None, tick: int = tick
        ) -> bool:
            for value in needed_by(action, schedule.stages):
                if value == same_cell:
                    continue
                made = usable.get(value)
                if made is None:
                    return False
                if made[1] + (1 if made[0] == rank else transfer_ticks) > tick:
                    return False
            return True

        row = [_fill(line, rank, ready, pairs) for rank, line in enumerate(lines)]
        for rank, cell in enumerate(row):
            for action in cell.actions:
                if value := produced_by(action):
                    usable[value] = (rank, tick)
        if not any(cell.actions for cell in row) and not _arriving(usable, tick, transfer_ticks):
            raise ScheduleError(f"deadlock at tick {tick}: no rank of {schedule.name} can go on.")
        grid.append(row)
    return grid


def _fill(line: _Line, rank: int, ready: Callable[..., bool], pairs: bool) -> Cell:
    """Choose this tick's cell of one rank and advance its line."""
    forward = gradient = None
    if line.f < len(line.forwards) and line.before_f[line.f] <= line.g:
        candidate = line.forwards[line.f]
        forward = candidate if ready(candidate, rank) else None
    made = produced_by(forward) if forward and pairs else None
    forwards_done = line.f + (made is not None)
    if line.g < len(line.gradients) and line.before_g[line.g] <= forwards_done:
        candidate = line.gradients[line.g]
        gradient = candidate if ready(candidate, rank, made) else None
    if gradient and not pairs:
        forward = None
    line.f += forward is not None
    line.g += gradient is not None
    return Cell(forward, gradient)


def _arriving(usable: dict[Value, tuple[int, int]], tick: int, transfer_ticks: int) -> bool:
    return any(made + transfer_ticks > tick for _, made in usable.values())
