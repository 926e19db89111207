"""What a search for a schedule is asked for, and how good an answer is.

Orders are lists of plain integers here, since a search looks at millions of ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs, Memory, lockstep_cost, place
from jaxpipe.schedule.lockstep import Lockstep

F, B, W = 0, 1, 2
Step = tuple[int, int, int]  # (F, B or W; stage; microbatch): an Action, quick to compare
Orders = list[list[Step]]
Score = tuple[float, ...]

OBJECTIVES = ("span", "makespan", "lockstep")
SLACK = 1e-9  # relative; sums of times and bytes are compared with this tolerance
NEVER = float("inf")
_OPS = (Op.F, Op.B, Op.W)


def check_objective(name: str) -> None:
    """Raise `ScheduleError` for an unknown objective."""
    if name not in OBJECTIVES:
        raise ScheduleError(f"unknown objective {name!r}: use one of {', '.join(OBJECTIVES)}.")


def limit_in_units(limit: str | float, placement: Placement, memory: Memory) -> float:
    """A memory limit in the unit of `memory`: `"1p"` is P microbatches through a rank's stages.

    Raises `ScheduleError` for other words.
    """
    if not isinstance(limit, str):
        return limit
    if limit not in ("1p", "2p"):
        raise ScheduleError(f"memory_limit={limit!r}: use '1p', '2p' or a number.")
    return int(limit[0]) * placement.stages * memory.F


@dataclass(frozen=True)
class Problem:
    """What is asked for: every rank within `limit` (unit of `memory`), and `objective` least."""

    name: str
    placement: Placement
    microbatches: int
    costs: Costs
    memory: Memory
    limit: float
    objective: str = "span"
    transfer_ticks: int = 1

    def __post_init__(self) -> None:
        check_objective(self.objective)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of every rank, first to last."""
        stages: list[list[int]] = [[] for _ in range(self.placement.pp)]
        for stage, rank in enumerate(self.placement.rank_of):
            stages[rank].append(stage)
        return stages

    @cached_property
    def times(self) -> list[list[float]]:
        """Time of `[op][stage]`."""
        stages = range(self.placement.stages)
        return [[self.costs.of(Action(op, stage, 0)) for stage in stages] for op in _OPS]

    @cached_property
    def steps(self) -> int:
        """Number of ops of the whole schedule: what one evaluation costs."""
        return 3 * self.placement.stages * self.microbatches

    @cached_property
    def room(self) -> int:
        """How many stages of a microbatch a rank may hold after F."""
        return int(self.limit / self.memory.F * (1 + SLACK))

    @cached_property
    def least(self) -> float:
        """What no schedule can beat: the work of the busiest rank."""
        per_stage = [sum(times) for times in zip(*self.times)]
        return self.microbatches * max(sum(per_stage[s] for s in own) for own in self.stages_of)

    def schedule(self, orders: Orders) -> Schedule:
        """The orders as a schedule."""
        actions = ([Action(_OPS[op], *where) for op, *where in order] for order in orders)
        return Schedule.of(self.name, self.placement, self.microbatches, actions)

    def score(self, orders: Orders) -> Score | None:
        """The objective, then what decides between equals; None for a deadlock."""
        begins = self.replay(orders)
        if begins is None:
            return None
        starts = [line[0] for line in begins]
        ends = [
            line[-1] + self.times[order[-1][0]][order[-1][1]] for line, order in zip(begins, orders)
        ]
        makespan = max(ends) - min(starts)
        span = max(end - start for start, end in zip(starts, ends))
        match self.objective:
            case "span":
                return span, makespan
            case "makespan":
                return makespan, span
        grid = place(self.schedule(orders), Lockstep(self.transfer_ticks))
        return lockstep_cost(grid, self.costs, self.transfer_ticks), makespan

    def fits(self, order: Sequence[Step]) -> bool:
        """Whether a rank's order stays within the memory."""
        change, limit = (self.memory.F, self.memory.B, self.memory.W), self.limit * (1 + SLACK)
        held = 0.0
        for op, _, _ in order:
            held += change[op]
            if held > limit:
                return False
        return True

    def replay(self, orders: Orders) -> list[list[float]] | None:
        """When every op begins, each as early as can be; None for a deadlock."""
        times, transfer, rank_of = self.times, self.costs.transfer, self.placement.rank_of
        last, m = self.placement.stages - 1, self.microbatches
        made = [[NEVER] * (m * (last + 1)) for _ in (F, B)]  # ends, by stage and microbatch
        waits: dict[tuple[int, int], int] = {}
        begins: list[list[float]] = [[] for _ in orders]
        clock = [0.0] * len(orders)
        runnable = list(range(len(orders)))
        while runnable:
            rank = runnable.pop()
            now, line = clock[rank], begins[rank]
            for op, stage, i in islice(orders[rank], len(line), None):
                own, need = stage * m + i, None
                if op == W or (op == B and stage == last):
                    begin = made[B if op == W else F][own]
                elif op == F and stage == 0:
                    begin = now
                elif op == B and made[F][own] == NEVER:
                    begin = NEVER
                else:
                    other = stage - 1 if op == F else stage + 1
                    need = (op, other * m + i)
                    begin = made[op][need[1]] + (transfer if rank_of[other] != rank else 0.0)
                if begin == NEVER:
                    if need:
                        waits[need] = rank
                    break
                begin = max(begin, now)
                line.append(begin)
                now = begin + times[op][stage]
                if op != W:
                    made[op][own] = now
                    if (op, own) in waits:
                        runnable.append(waits.pop((op, own)))
            clock[rank] = now
        if any(len(line) < len(order) for line, order in zip(begins, orders)):
            return None
        return begins

    def critical(self, orders: Orders) -> list[tuple[int, int]]:
        """The `(rank, position)` of ops on the longest path that began when the one before ended.

        The path is traced back from the end of the rank with the longest span, or of the last
        rank to end where the makespan counts. Only a change of order at these ops can shorten it.
        """
        begins = self.replay(orders)
        where = {step: (r, at) for r, order in enumerate(orders) for at, step in enumerate(order)}
        ends = [
            [begin + self.times[op][stage] for begin, (op, stage, _) in zip(line, order)]
            for line, order in zip(begins, orders)
        ]
        first = [line[0] if self.objective == "span" else 0.0 for line in begins]
        rank = max(range(len(orders)), key=lambda r: ends[r][-1] - first[r])
        at, found = len(orders[rank]) - 1, []
        while True:
            if at and ends[rank][at - 1] >= begins[rank][at]:
                found.append((rank, at))
                at -= 1
                continue
            op, stage, i = orders[rank][at]
            if op == F and stage == 0:
                return found
            if op == W:
                before = (B, stage, i)
            elif op == B and stage == self.placement.stages - 1:
                before = (F, stage, i)
            else:
                before = (op, stage - 1 if op == F else stage + 1, i)
            rank, at = where[before]
