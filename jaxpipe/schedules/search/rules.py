"""List scheduling: a simulation in time order in which every rank picks its next op by rules.

After Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1; the priority of an op comes
from a building block (see `blocks`).
"""

import heapq
import random
from dataclasses import dataclass, replace
from typing import Any

from jaxpipe.schedules.search.problem import (
    NEVER,
    SLACK,
    B,
    F,
    Orders,
    Replay,
    Score,
    SearchProblem,
    Step,
    W,
)


@dataclass(frozen=True)
class PriorityRules:
    """The rules of every rank; `follow`, `wait`, `fill` and `warmup` have one entry per rank.

    Attributes:
      period: ticks of the block between consecutive microbatches.
      phases: per rank, the ticks of F and the ticks of B of microbatch 0 in the block, one for each
        stage of the rank.
      follow: whether ops may overtake the block's order: 0 all may; 1 forwards keep the order;
        2 all keep the order.
      wait: whether to idle for a more urgent op whose input arrives before the available op ends.
      fill: whether to run a W in a gap that is shorter than W: 0 never; 1 if idling through the gap
        would make this rank's idle time the longest; 2 always.
      warmup: forwards of the rank's first stage before its first B.
      most: the largest warmup to try.
    """

    period: float
    phases: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    follow: tuple[int, ...]
    wait: tuple[bool, ...]
    fill: tuple[int, ...]
    warmup: tuple[int, ...]
    most: int

    def mutate(self, dice: random.Random) -> "PriorityRules":
        """Return a copy with one to three random changes, each on one rank or on all ranks."""
        lists: dict[str, list[Any]] = {name: list(getattr(self, name)) for name in _RULES}
        pp, chunks = len(self.warmup), len(self.phases[0][F])
        for _ in range(dice.choice((1, 1, 2, 3))):
            name = dice.choice(_RULES)
            ranks = range(pp) if dice.random() < _EVERY_RANK / chunks else (dice.randrange(pp),)
            op, chunk = dice.choice((F, B)), dice.randrange(chunks)
            shift, choice = dice.choice((-3, -2, -1, 1, 2, 3)), dice.randrange(3)
            for rank in ranks:
                old = lists[name][rank]
                if name == "phases":
                    both = [list(old[F]), list(old[B])]
                    both[op][chunk] += shift
                    lists[name][rank] = tuple(map(tuple, both))
                elif name == "warmup":
                    lists[name][rank] = max(1, min(self.most, old + (1 if shift > 0 else -1)))
                else:
                    lists[name][rank] = choice % 2 if name == "wait" else choice
        changed: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
        return replace(self, **changed)


_EVERY_RANK = 0.2  # share of changes that affect all ranks, divided by the number of chunks
_RULES = ("phases", "phases", "follow", "wait", "fill", "warmup")  # phases change twice as often


def list_schedule(
    problem: SearchProblem, rules: PriorityRules, most: float = NEVER
) -> tuple[Score, Orders] | None:
    """Return the orders that the rules lead to, and their score.

    Returns None for a deadlock, and as soon as the first entry of the score must exceed `most`.
    """
    ranks = [_RankSimulation(problem, rules, rank) for rank in range(problem.placement.pp)]
    replay = Replay(problem, most)
    transfer, rank_of = problem.target.costs.transfer, problem.placement.rank_of
    last, left = problem.placement.stages - 1, problem.steps
    events = [(0.0, rank) for rank in range(len(ranks))]
    while events and left:
        now, at = heapq.heappop(events)
        rank = ranks[at]
        chosen = rank.choose(now, ranks) if now >= rank.free else None
        if chosen is None:
            continue
        op, stage, i = rank.start(now, *chosen)
        if not replay.advance(at, rank.order):
            return None
        left -= 1
        heapq.heappush(events, (rank.free, at))
        if op == W:
            continue
        following = stage + 1 if op == F else stage - 1
        if following > last:
            rank.arrivals[B][stage][i] = rank.free
        elif following >= 0:
            to = rank_of[following]
            there = rank.free + (transfer if to != at else 0.0)
            other = ranks[to]
            other.arrivals[op][following][i] = there
            # The neighbour decides again now, knowing the arrival time, and when the input arrives.
            if other.free <= now:
                heapq.heappush(events, (now, to))
            if other.free < there:
                heapq.heappush(events, (there, to))
    if left:
        return None
    orders = [rank.order for rank in ranks]
    return problem.score(replay, orders), orders


class _RankSimulation:
    """The state of one rank in the simulation, and its decisions."""

    __slots__ = (
        "arrivals", "done", "fill", "first", "follow", "free", "growth", "idle", "limit", "lines",
        "live_memory", "m", "memory", "order", "pending", "period", "times", "w_count", "wait",
        "warmup",
    )  # fmt: skip

    def __init__(self, problem: SearchProblem, rules: PriorityRules, rank: int):
        stages, memory = problem.rank_stages[rank], problem.target.memory
        self.m, self.times, self.period = problem.microbatches, problem.times, rules.period
        self.follow, self.wait, self.fill = rules.follow[rank], rules.wait[rank], rules.fill[rank]
        self.first, self.warmup = stages[0], rules.warmup[rank]
        self.memory, self.limit = (memory.F, memory.B, memory.W), problem.limit * (1 + SLACK)
        self.growth = memory.b_growth
        self.free = self.idle = self.live_memory = 0.0  # free: time of the next decision
        # By op and stage: the number of finished ops, and known arrival times of their inputs.
        self.done = [dict.fromkeys(stages, 0) for _ in (F, B)]
        self.arrivals = [{stage: [NEVER] * self.m for stage in stages} for _ in (F, B)]
        if 0 in stages:
            self.arrivals[F][0] = [0.0] * self.m
        self.pending: list[Step] = []  # every W whose B is done, in order
        self.w_count = 0  # how many of `pending` have run
        self.order: list[Step] = []
        # An F of an early stage must leave memory for the F of later stages on this rank.
        rooms = [1] * len(stages) if self.follow else range(len(stages), 0, -1)
        self.lines = [
            (stage, phase_f, phase_b, room * memory.F)
            for stage, phase_f, phase_b, room in zip(stages, *rules.phases[rank], rooms)
        ]

    def choose(self, now: float, ranks: "list[_RankSimulation]") -> tuple[int, int] | None:
        """Return the op and stage to start now; None: stay idle."""
        heads, blocked = self._next_ops(now)
        soonest = NEVER
        for _, there, op, stage in heads:
            if there <= now:
                if not self.wait or soonest >= now + self.times[op][stage]:
                    return op, stage
                break
            if there < soonest:
                soonest = there
        if self.w_count == len(self.pending):
            return None
        stage = self.pending[self.w_count][1]
        if blocked or self.fill == 2:
            return W, stage
        gap = min([there for _, there, _, _ in heads if there > now], default=NEVER) - now
        if gap >= self.times[W][stage] * (1 - SLACK):
            return W, stage
        if self.fill == 1 and self.idle + gap >= max([rank.idle for rank in ranks]):
            return W, stage
        return None

    def _next_ops(self, now: float) -> tuple[list[tuple[float, float, int, int]], bool]:
        """Return the next F and B of each stage, and whether memory blocks one of them.

        The ops are (priority, arrival of the input, op, stage), most urgent first. The second
        result is True where the input of an op has arrived, or arrives within the time of a W, and
        only the memory limit prevents the op.
        """
        heads, blocked = [], False
        m, period, follow, limit = self.m, self.period, self.follow, self.limit
        cramped = self.live_memory + self.growth > limit  # a W must run before the next B
        # An F must leave memory for the growth of a B, after all pending W have freed theirs.
        waiting = len(self.pending) - self.w_count
        needed = max(self.live_memory, self.live_memory + waiting * self.memory[W] + self.growth)
        (forward, backward), (to_f, to_b) = self.done, self.arrivals
        for stage, phase_f, phase_b, room in self.lines:
            i, k = forward[stage], backward[stage]
            if i < m and (i < self.warmup or stage != self.first or k):
                there = to_f[stage][i]
                if needed + room <= limit:
                    heads.append((phase_f + i * period, there, F, stage))
                else:
                    blocked = blocked or there < now + self.times[W][stage]
                    if follow:
                        heads.append((phase_f + i * period, NEVER, F, stage))
            if k < m and not cramped:
                heads.append((phase_b + k * period, to_b[stage][k], B, stage))
            elif k < m:
                blocked = blocked or to_b[stage][k] < now + self.times[W][stage]
                if follow == 2:
                    heads.append((phase_b + k * period, NEVER, B, stage))
        heads.sort()
        if follow == 2:
            return heads[:1], blocked
        if follow == 1:  # a forward is a candidate only if it is the most urgent op
            heads = heads[:1] + [head for head in heads[1:] if head[2] == B]
        return heads, blocked

    def start(self, now: float, op: int, stage: int) -> Step:
        """Start an op: advance the clock, memory and order of this rank."""
        if op == W:
            step = self.pending[self.w_count]
            self.w_count += 1
        else:
            done = self.done[op]
            step = op, stage, done[stage]
            done[stage] += 1
            if op == B:
                self.pending.append((W, stage, step[2]))
        if self.order:
            self.idle += now - self.free
        self.order.append(step)
        self.free = now + self.times[op][stage]
        self.live_memory += self.memory[op]
        return step
