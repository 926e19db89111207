"""List scheduling: a simulation in time order in which every rank decides by a few rules.

After Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1, with the urgency of an op
taken from a building block (see `blocks`).
"""

import heapq
import random
from dataclasses import dataclass, replace

from jaxpipe.schedule.problem import NEVER, SLACK, B, F, Orders, Problem, W


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


def list_schedule(problem: Problem, rules: Rules) -> Orders | None:
    """The orders that the rules lead to, or None where they lead into a deadlock."""
    return _Listing(problem, rules).run()


class _Listing:
    """All ranks in time order; each decides with what it knows by then."""

    def __init__(self, problem: Problem, rules: Rules):
        self.rules, self.m = rules, problem.microbatches
        self.stages_of, self.rank_of = problem.stages_of, problem.placement.rank_of
        self.last = problem.placement.stages - 1
        self.times, self.transfer = problem.times, problem.costs.transfer
        self.change = (problem.memory.F, problem.memory.B, problem.memory.W)
        self.limit = problem.limit * (1 + SLACK)
        ranks, stages = range(problem.placement.pp), range(self.last + 1)
        self.orders: Orders = [[] for _ in ranks]
        self.done = [[0] * len(stages) for _ in (F, B)]
        self.arrivals: list[list[list[float]]] = [[[] for _ in stages] for _ in (F, B)]
        self.arrivals[F][0] = [0.0] * self.m  # when each input is there, as far as known
        self.pending: list[list[tuple[int, int]]] = [[] for _ in ranks]  # B done, W not
        self.taken = [0] * len(ranks)  # of pending
        self.free = [0.0] * len(ranks)  # when a rank may decide again
        self.held = [0.0] * len(ranks)
        self.idle = [0.0] * len(ranks)
        self.events = [(0.0, rank) for rank in ranks]
        heapq.heapify(self.events)

    def run(self) -> Orders | None:
        left = 3 * (self.last + 1) * self.m
        while self.events and left:
            now, rank = heapq.heappop(self.events)
            if now < self.free[rank]:
                continue
            chosen = self._choose(rank, now)
            if chosen is not None:
                self._start(rank, now, *chosen)
                left -= 1
        return None if left else self.orders

    def _choose(self, rank: int, now: float) -> tuple[int, int] | None:
        """The op and stage that a free rank starts at this moment; None: it waits."""
        rules = self.rules
        heads, blocked = self._heads(rank, now)
        soonest, chosen = NEVER, None
        for _, there, op, stage in heads:
            if there <= now:
                if soonest >= now + self.times[op][stage] or not rules.wait[rank]:
                    chosen = op, stage
                break
            soonest = min(soonest, there)
        if chosen:
            return chosen
        if self.taken[rank] == len(self.pending[rank]):
            return None
        gap = min((there for _, there, _, _ in heads if there > now), default=NEVER) - now
        stage = self.pending[rank][self.taken[rank]][0]
        fits = gap >= self.times[W][stage] * (1 - SLACK)
        fill = rules.fill[rank]
        worst = fill == 1 and self.idle[rank] + gap >= max(self.idle)
        return (W, stage) if fits or blocked or worst or fill == 2 else None

    def _heads(self, rank: int, now: float) -> tuple[list[tuple[float, float, int, int]], bool]:
        """The next F and B of each stage, most urgent first: (urgency, when there, op, stage).

        Second: is an F that is there, or soon will be, kept out by the memory alone?
        """
        rules, stages = self.rules, self.stages_of[rank]
        phases, follow = rules.phases[rank], rules.follow[rank]
        first = stages[0]
        warm = not self.done[B][first] and (len(stages) > 1 or not self.pending[rank])
        heads, blocked = [], False
        for chunk, stage in enumerate(stages):
            for op in (F, B):
                i = self.done[op][stage]
                if i == self.m:
                    continue
                known = self.arrivals[op][stage]
                there = known[i] if i < len(known) else NEVER
                if op == F:
                    if warm and stage == first and i >= rules.warmup[rank]:
                        continue
                    # An F of an early stage leaves room for those that must follow it here.
                    room = 1 if follow else len(stages) - chunk
                    if self.held[rank] + room * self.change[F] > self.limit:
                        blocked |= there < now + self.times[W][stage]
                        if not follow:
                            continue
                        there = NEVER
                heads.append((phases[op][chunk] + i * rules.period, there, op, stage))
        heads.sort()
        if follow == 2:
            return heads[:1], blocked
        if follow == 1:
            forward = next((head for head in heads if head[2] == F), None)
            ahead = heads and heads[0] is forward
            heads = [head for head in heads if head[2] == B or (ahead and head is forward)]
        return heads, blocked

    def _start(self, rank: int, now: float, op: int, stage: int) -> None:
        """Do it: the clock, the memory, and what it makes known to others."""
        end = now + self.times[op][stage]
        if self.orders[rank]:
            self.idle[rank] += now - self.free[rank]
        self.free[rank] = end
        self.held[rank] += self.change[op]
        heapq.heappush(self.events, (end, rank))
        if op == W:
            stage, i = self.pending[rank][self.taken[rank]]
            self.taken[rank] += 1
        else:
            i = self.done[op][stage]
            self.done[op][stage] += 1
            if op == B:
                self.pending[rank].append((stage, i))
            following = stage + 1 if op == F else stage - 1
            if following > self.last:
                self.arrivals[B][stage].append(end)
            elif following >= 0:
                there = end + (self.transfer if self.rank_of[following] != rank else 0.0)
                self.arrivals[op][following].append(there)
                # The neighbour may decide anew now that it knows, and when the input is there.
                heapq.heappush(self.events, (now, self.rank_of[following]))
                heapq.heappush(self.events, (there, self.rank_of[following]))
        self.orders[rank].append((op, stage, i))
