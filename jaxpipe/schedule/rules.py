"""List scheduling: a simulation in time order in which every rank decides by a few rules.

After Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1, with the urgency of an op
taken from a building block (see `blocks`).
"""

import heapq
import random
from dataclasses import dataclass, replace

from jaxpipe.schedule.problem import NEVER, SLACK, B, F, Orders, Problem, Replay, Score, Step, W


@dataclass(frozen=True)
class Rules:
    """What every rank does, one entry a rank.

    `phases[rank]`: when F and when B of microbatch 0 happen by the block, for each of the rank's
    stages; `period` later those of microbatch 1. `follow`: may ops overtake the block's order: 0
    all may, 1 forwards keep to it, 2 all keep to it. `wait`: stay idle for a more urgent op that
    will be there before the op at hand is done. `fill`: put a W into a gap too short for it: 0
    never, 1 while this rank's idle time is the longest of all, 2 always. `warmup`: forwards of the
    first stage before the first B.
    """

    period: float
    phases: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    follow: tuple[int, ...]
    wait: tuple[bool, ...]
    fill: tuple[int, ...]
    warmup: tuple[int, ...]
    most: int  # the largest warmup to try

    def changed(self, dice: random.Random) -> "Rules":
        """One to three rules made anew, each of a single rank or, at times, of every rank."""
        lists = {name: list(getattr(self, name)) for name in _RULES}
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
                    new = tuple(map(tuple, both))
                elif name == "warmup":
                    new = max(1, min(self.most, old + (1 if shift > 0 else -1)))
                else:
                    new = choice % 2 if name == "wait" else choice
                lists[name][rank] = new
        return replace(self, **{name: tuple(values) for name, values in lists.items()})


_EVERY_RANK = 0.2  # of the changes; of two chunks, half of that
_RULES = ("phases", "phases", "follow", "wait", "fill", "warmup")  # phases change twice as often


def list_schedule(
    problem: Problem, rules: Rules, most: float = NEVER
) -> tuple[Score, Orders] | None:
    """The score and the orders that the rules lead to.

    None where they lead into a deadlock, and as soon as the score is sure to begin with more than
    `most`.
    """
    ranks = [_Rank(problem, rules, rank) for rank in range(problem.placement.pp)]
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
            # The neighbour may decide anew now that it knows, and when the input is there.
            if other.free <= now:
                heapq.heappush(events, (now, to))
            if other.free < there:
                heapq.heappush(events, (there, to))
    if left:
        return None
    orders = [rank.order for rank in ranks]
    return replay.score(orders), orders


class _Rank:
    """What a rank knows by now, and how it decides."""

    __slots__ = (
        "arrivals", "done", "fill", "first", "follow", "free", "growth", "held", "idle", "limit",
        "lines", "m", "memory", "order", "pending", "period", "taken", "times", "wait", "warmup",
    )  # fmt: skip

    def __init__(self, problem: Problem, rules: Rules, rank: int):
        stages, memory = problem.stages_of[rank], problem.target.memory
        self.m, self.times, self.period = problem.microbatches, problem.times, rules.period
        self.follow, self.wait, self.fill = rules.follow[rank], rules.wait[rank], rules.fill[rank]
        self.first, self.warmup = stages[0], rules.warmup[rank]
        self.memory, self.limit = (memory.F, memory.B, memory.W), problem.limit * (1 + SLACK)
        self.growth = memory.growth
        self.free = self.idle = self.held = 0.0  # free: when it may decide again
        # By op and stage: how many are done, and when the input of each is there, as far as known.
        self.done = [dict.fromkeys(stages, 0) for _ in (F, B)]
        self.arrivals = [{stage: [NEVER] * self.m for stage in stages} for _ in (F, B)]
        if 0 in stages:
            self.arrivals[F][0] = [0.0] * self.m
        self.pending: list[Step] = []  # the W whose B is done, first to last
        self.taken = 0  # of pending
        self.order: list[Step] = []
        # An F of an early stage leaves room for those that must follow it here.
        rooms = [1] * len(stages) if self.follow else range(len(stages), 0, -1)
        self.lines = [
            (stage, *(rules.phases[rank][op][chunk] for op in (F, B)), room * memory.F)
            for chunk, (stage, room) in enumerate(zip(stages, rooms))
        ]

    def choose(self, now: float, ranks: "list[_Rank]") -> tuple[int, int] | None:
        """The op and stage that it starts at this moment; None: it waits."""
        heads, blocked = self._heads(now)
        soonest = NEVER
        for _, there, op, stage in heads:
            if there <= now:
                if not self.wait or soonest >= now + self.times[op][stage]:
                    return op, stage
                break
            if there < soonest:
                soonest = there
        if self.taken == len(self.pending):
            return None
        stage = self.pending[self.taken][1]
        if blocked or self.fill == 2:
            return W, stage
        gap = min([there for _, there, _, _ in heads if there > now], default=NEVER) - now
        if gap >= self.times[W][stage] * (1 - SLACK):
            return W, stage
        if self.fill == 1 and self.idle + gap >= max([rank.idle for rank in ranks]):
            return W, stage
        return None

    def _heads(self, now: float) -> tuple[list[tuple[float, float, int, int]], bool]:
        """The next F and B of each stage, most urgent first: (urgency, when there, op, stage).

        Second: is an F that is there, or soon will be, kept out by the memory alone?
        """
        heads, blocked = [], False
        m, period, follow, limit = self.m, self.period, self.follow, self.limit
        cramped = self.held + self.growth > limit  # no B before a W
        # An F leaves room for the growth of a B, once all W that wait have made theirs.
        waiting = len(self.pending) - self.taken
        held = max(self.held, self.held + waiting * self.memory[W] + self.growth)
        (forward, backward), (to_f, to_b) = self.done, self.arrivals
        for stage, phase_f, phase_b, room in self.lines:
            i, k = forward[stage], backward[stage]
            if i < m and (i < self.warmup or stage != self.first or k):
                there = to_f[stage][i]
                if held + room <= limit:
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
        if follow == 1:  # of the forwards only one that is the most urgent of all
            heads = heads[:1] + [head for head in heads[1:] if head[2] == B]
        return heads, blocked

    def start(self, now: float, op: int, stage: int) -> Step:
        """Do it: the clock and the memory of this rank."""
        if op == W:
            step = self.pending[self.taken]
            self.taken += 1
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
        self.held += self.memory[op]
        return step
