"""The target of a schedule search, and the score of a candidate.

Orders are lists of plain integers in the search, since it visits millions of ops.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxpipe.core.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.scan import cell_starts, neighbour_ranks, vocab_parallel_ticks
from jaxpipe.core.schedule.simulate import peak_memory
from jaxpipe.schedules.search.target import Target, check_objective

F, B, W = 0, 1, 2
Step = tuple[int, int, int]  # (F, B or W; stage; microbatch), an Action that compares faster
Orders = list[list[Step]]
Score = tuple[float, ...]

SLACK = 1e-9  # relative; sums of times and bytes are compared with this tolerance
NEVER = float("inf")
_OPS = (Op.F, Op.B, Op.W)


def at_least(limit: float) -> str:
    """Return a short number that is not below a limit.

    >>> at_least(16 / 7), at_least(4.0)
    ('2.28573', '4')
    """
    text = f"{limit:g}"  # six digits, rounded to the nearest
    return text if float(text) * (1 + SLACK) >= limit else f"{limit * (1 + 5e-6):g}"


@dataclass(frozen=True)
class SearchProblem:
    """A search problem: minimize the target's objective, with every rank within `limit`.

    `limit` is in the unit of the target's memory and replaces the target's `memory_limit`.
    """

    name: str
    placement: Placement
    microbatches: int
    limit: float
    target: Target

    def __post_init__(self) -> None:
        check_objective(self.target.objective)

    @cached_property
    def rank_stages(self) -> list[list[int]]:
        """The stages of every rank, in order."""
        stages: list[list[int]] = [[] for _ in range(self.placement.pp)]
        for stage, rank in enumerate(self.placement.rank_of):
            stages[rank].append(stage)
        return stages

    @cached_property
    def times(self) -> list[list[float]]:
        """Times of the ops, `[op][stage]`."""
        stages = range(self.placement.stages)
        time = self.target.costs.action_time
        return [[time(Action(op, stage, 0)) for stage in stages] for op in _OPS]

    @cached_property
    def steps(self) -> int:
        """Number of ops of the schedule, the cost of one evaluation."""
        return 3 * self.placement.stages * self.microbatches

    @cached_property
    def live_limit(self) -> int:
        """Limit on (microbatch, stage) pairs that are live on a rank after F."""
        memory = self.target.memory
        return int((self.limit - memory.b_growth) / memory.F * (1 + SLACK))

    def check_limit(self) -> None:
        """Raise `ScheduleError` unless the limit lets every rank run one microbatch alone."""
        memory, stages = self.target.memory, max(map(len, self.rank_stages))
        least = stages * memory.F + memory.b_growth
        if self.limit * (1 + SLACK) < least:
            raise ScheduleError(
                f"{self.name}: memory_limit={self.limit:g} is less than one microbatch takes on a "
                f"rank, {least:g}: use at least {at_least(least)}."
            )

    @cached_property
    def work(self) -> list[float]:
        """Total time of the ops of every rank."""
        per_stage = [sum(times) for times in zip(*self.times)]
        m = self.microbatches
        return [m * sum(per_stage[s] for s in stages) for stages in self.rank_stages]

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the time of any schedule: the work of the busiest rank."""
        return max(self.work)

    @cached_property
    def consumers(self) -> list[list[tuple[int, int, float] | None]]:
        """Consumer of a result, `[op][stage]`: its op and stage, and the transfer time, or None."""
        rank_of, last = self.placement.rank_of, self.placement.stages - 1
        table: list[list[tuple[int, int, float] | None]] = [[], [], [None] * (last + 1)]
        for stage, rank in enumerate(rank_of):
            for op, other in ((F, stage + 1), (B, stage - 1)):
                if 0 <= other <= last:
                    travels = self.target.costs.transfer * (rank_of[other] != rank)
                    table[op].append((op, other, travels))
                else:
                    table[op].append((B, last, 0.0) if op == F else None)
        return table

    @cached_property
    def in_ticks(self) -> "SearchProblem":
        """The same problem with times counted in ticks of the scan."""
        travels = self.target.lockstep.transfer_ticks - 1
        return replace(self, target=Target(Costs(transfer=travels), objective="makespan"))

    @cached_property
    def neighbours(self) -> np.ndarray:
        """The ranks that each rank waits for in the scan, the result of `neighbour_ranks`."""
        every = zip(self.placement.rank_of, self.placement.rank_of[1:])
        both = [[(a, b), (b, a)] for a, b in every if a != b]
        pairs = [pair for pairs in both for pair in pairs]
        return neighbour_ranks({0: tuple(pairs)}, self.placement.pp)

    def scan_time(self, orders: Orders) -> float:
        """Return the time of the scan; `scan.scan_time` without building a schedule."""
        _, times, starts = self._simulate_scan(orders)
        return float((starts[-1] + times[-1]).max())

    def _simulate_scan(self, orders: Orders) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
        """Return the tick of every step, by rank; and times and starts of all cells, `[T, P]`."""
        replay = self.in_ticks.replay(orders)
        assert replay is not None  # orders without a deadlock
        ticks = [[int(begin) for begin in line] for line in replay.begins]
        times = np.zeros((1 + max(line[-1] for line in ticks), len(ticks)))
        for rank, (line, order) in enumerate(zip(ticks, orders)):
            times[line, rank] = [self.times[op][stage] for op, stage, _ in order]
        meetings: Iterable[int] = range(len(times)) if self.target.lockstep.synchronizes_all else ()
        if self.target.lockstep.vocab_parallel and not self.target.lockstep.synchronizes_all:
            steps = (zip(line, order) for line, order in zip(ticks, orders))
            ops = ((tick, "FBW"[op], stage) for of in steps for tick, (op, stage, _) in of)
            meetings = vocab_parallel_ticks(ops, self.placement.stages)
        lockstep, transfer = self.target.lockstep, self.target.costs.transfer
        return (
            ticks,
            times,
            cell_starts(times, self.neighbours[None], transfer, lockstep.transfer_ticks, meetings),
        )

    def _critical_scan_steps(self, orders: Orders) -> list[tuple[int, int]]:
        """Return `critical_steps` in scan time: steps of the ranks that others wait for."""
        ticks, times, starts = self._simulate_scan(orders)
        ends = starts + times
        position = [{tick: at for at, tick in enumerate(line)} for line in ticks]
        rank, steps = int(ends[-1].argmax()), []
        for tick in range(len(ends) - 1, 0, -1):
            if tick in position[rank]:
                steps.append((rank, position[rank][tick]))
            if starts[tick, rank] > ends[tick - 1, rank]:  # it has waited for another rank
                before = (ends if self.target.lockstep.transfer_ticks == 1 else starts)[tick - 1]
                all_meet = self.target.lockstep.synchronizes_all
                met = range(len(orders)) if all_meet else self.neighbours[:, rank]
                rank = max(met, key=lambda other: before[other])
        return [(rank, at) for rank, at in steps if at]

    def schedule(self, orders: Orders) -> Schedule:
        """Return the orders as a schedule."""
        actions = ([Action(_OPS[op], *where) for op, *where in order] for order in orders)
        return Schedule.from_orders(self.name, self.placement, self.microbatches, actions)

    def score(self, replay: "Replay", orders: Orders) -> Score:
        """Return the objective, followed by a tie-breaker, of orders that were replayed."""
        starts = [line[0] for line in replay.begins]
        makespan = max(replay.clocks) - min(starts)
        span = max(end - start for start, end in zip(starts, replay.clocks))
        match self.target.objective:
            case "span":
                return span, makespan
            case "makespan":
                return makespan, span
        return self.scan_time(orders), makespan

    @cached_property
    def asynchronous(self) -> "SearchProblem":
        """The same problem for asynchronous ranks, with the objective "span" in place of "scan"."""
        if self.target.objective != "scan":
            return self
        return replace(self, target=replace(self.target, objective="span"))

    def schedule_fits(self, schedule: Schedule) -> bool:
        """Return whether a schedule stays within the memory limit."""
        return max(peak_memory(schedule, self.target.memory)) <= self.limit * (1 + SLACK)

    def order_fits(self, order: Sequence[Step]) -> bool:
        """Return whether a rank's order stays within the memory limit."""
        memory, limit = self.target.memory, self.limit * (1 + SLACK)
        change = memory.F, memory.B, memory.W
        live = 0.0
        for op, _, _ in order:
            live += change[op]
            if live > limit:
                return False
        return True

    def replay(self, orders: Orders, most: float = NEVER) -> "Replay | None":
        """Run the orders, each op as early as possible.

        Returns None for a deadlock, and as soon as the first entry of the score must exceed `most`.
        """
        replay, left = Replay(self, most), sum(map(len, orders))
        runnable = replay.runnable
        runnable += range(len(orders))
        while runnable:
            rank = runnable.pop()
            left -= replay.advance(rank, orders[rank])
            if replay.is_hopeless:
                return None
        return None if left else replay

    def critical_steps(self, orders: Orders, begins: list[list[float]]) -> list[tuple[int, int]]:
        """Return `(rank, position)` of ops on the longest path that start as the previous op ends.

        The path is traced back from the end of the rank with the longest span, or for the makespan
        from the last rank to end. Only a change of order at these ops can shorten it.
        """
        if self.target.objective == "scan":
            return self._critical_scan_steps(orders)
        where = {step: (r, at) for r, order in enumerate(orders) for at, step in enumerate(order)}
        ends = [
            [begin + self.times[op][stage] for begin, (op, stage, _) in zip(line, order)]
            for line, order in zip(begins, orders)
        ]
        first = [line[0] if self.target.objective == "span" else 0.0 for line in begins]
        rank = max(range(len(orders)), key=lambda r: ends[r][-1] - first[r])
        at, steps = len(orders[rank]) - 1, []
        while True:
            if at and ends[rank][at - 1] >= begins[rank][at]:
                steps.append((rank, at))
                at -= 1
                continue
            op, stage, i = orders[rank][at]
            if op == F and stage == 0:
                return steps
            if op == W:
                before = (B, stage, i)
            elif op == B and stage == self.placement.stages - 1:
                before = (F, stage, i)
            else:
                before = (op, stage - 1 if op == F else stage + 1, i)
            rank, at = where[before]


class Replay:
    """A simulation that starts ops as early as possible; `begins[rank]` has their start times.

    `most` limits the first entry of the score. A rank's idle time may not exceed `most` minus its
    own work; once it does, the replay is `is_hopeless`.
    """

    def __init__(self, problem: SearchProblem, most: float = NEVER):
        ranks, count = range(problem.placement.pp), problem.placement.stages * problem.microbatches
        self.problem, self.m = problem, problem.microbatches
        self.times, self.consumers = problem.times, problem.consumers
        self.begins: list[list[float]] = [[] for _ in ranks]
        self.clocks = [0.0 for _ in ranks]
        # Arrival time of an op's input, `[op][stage * microbatches + microbatch]`.
        self.ready = [[NEVER] * count for _ in _OPS]
        self.ready[F][: self.m] = [0.0] * self.m
        self.blocked: dict[Step, int] = {}  # step whose input is missing -> the waiting rank
        self.runnable: list[int] = []  # ranks whose missing input has arrived
        self.late_start_counts = problem.target.objective != "span"  # a scan takes >= the makespan
        self.slack = [most * (1 + SLACK) - work for work in problem.work]
        self.is_hopeless = False

    def advance(self, rank: int, order: Sequence[Step]) -> int:
        """Run a rank's next steps until an input is missing or the score is hopeless.

        Returns the number of steps that it has started.
        """
        line, clock, m = self.begins[rank], self.clocks[rank], self.m
        ready, times = self.ready, self.times
        all_following, waits = self.consumers, self.blocked
        first = len(line)
        for at in range(first, len(order)):
            op, stage, i = step = order[at]
            begin = ready[op][stage * m + i]
            if begin <= clock:
                begin = clock
            elif begin == NEVER:
                waits[step] = rank
                break
            elif line or self.late_start_counts:
                self.slack[rank] -= begin - clock
                if self.slack[rank] < 0:
                    self.is_hopeless = True
                    break
            line.append(begin)
            clock = begin + times[op][stage]
            if op == B:
                ready[W][stage * m + i] = clock
            if following := all_following[op][stage]:
                op, stage, delay = following
                ready[op][stage * m + i] = clock + delay
                if waits and (op, stage, i) in waits:
                    self.runnable.append(waits.pop((op, stage, i)))
        self.clocks[rank] = clock
        return len(line) - first
