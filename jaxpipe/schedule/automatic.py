"""zb_auto: zero-bubble schedules for measured costs and a memory limit.

A greedy simulation in time order builds the orders: whenever a rank is free it takes, by rules, the
next B, the next F, a pending W, or waits (Qi et al. 2024, section 3.1). The rules have four knobs a
rank, the paper's binary choices made per rank:

  warmup      forwards before the first B, as far as memory allows
  fill        put a W into a gap that is too short for it: never, only while this rank's idle time
              is the longest of all, or always
  delay       let an F begin that will hold up a B about to arrive
  eager       after a B, take the next B if it is there, instead of an F

The knobs are first set alike on all ranks over a grid, then improved rank by rank by a seeded local
search. zb_h1 and zb_h2 stand as candidates where they fit the memory, so the result is never worse.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs, lockstep_cost, place
from jaxpipe.schedule.loop import zb_h1, zb_h2
from jaxpipe.schedule.simulate import clock

_NEVER = float("inf")
_WALKS = 3  # local searches, from the best points of the grid
_SLACK = 1e-9  # relative; sums of times and bytes are compared with this tolerance


@dataclass(frozen=True)
class Memory:
    """What the ops of one microbatch do to a rank's memory, in one unit: F takes, B and W free."""

    F: float = 1.0
    B: float = 0.0
    W: float = -1.0


@dataclass(frozen=True)
class _Knobs:
    warmup: tuple[int, ...]
    fill: tuple[int, ...]  # 0 never, 1 while this rank has idled longest, 2 always
    delay: tuple[bool, ...]
    eager: tuple[bool, ...]


def zb_auto(
    pp: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    memory: Memory | None = None,
    memory_limit: str | float = "2p",
    objective: str = "span",
    transfer_ticks: int = 1,
    evaluations: int | None = None,
) -> Schedule:
    """The best schedule found that keeps every rank within the limit.

    `memory_limit` is `"1p"` or `"2p"` (P or 2P forwards' worth) or a number in the unit of
    `memory`. `objective` is what shall be short: `"span"` of the slowest rank, `"makespan"`, or
    the `"lockstep"` of the scan with `transfer_ticks`. `evaluations` bounds the search (None: 400,
    or as many as take a quarter of a minute).

    Raises `ScheduleError` for an unknown objective or limit, and where no microbatch fits the
    limit, with the least that works.
    """
    costs, memory = costs or Costs(), memory or Memory()
    limit = _limit(memory_limit, pp, memory)
    room = int(limit / memory.F * (1 + _SLACK))
    if room < 1:
        raise ScheduleError(
            f"zb_auto: memory_limit={memory_limit} ({limit:g}) is less than one forward takes, "
            f"{memory.F:g}: use at least {memory.F:g}."
        )
    score = _objective(objective, costs, transfer_ticks)
    cap = min(room, microbatches)
    budget = evaluations or min(400, max(40, 350_000 // (pp * microbatches)))

    def attempt(knobs: _Knobs) -> tuple[float, Schedule] | None:
        orders = _Greedy(pp, microbatches, costs, memory, limit, knobs).run()
        if orders is None:
            return None
        schedule = Schedule.of("zb_auto", Placement.loop(pp), microbatches, orders)
        return score(schedule), schedule

    grid = _grid(pp, cap)[: budget // 2]
    found = [(*result, knobs) for knobs in grid if (result := attempt(knobs))]
    found = sorted(found, key=lambda item: item[0])[:_WALKS]
    dice = random.Random(0)
    for walk, best in enumerate(found):
        for _ in range((budget - len(grid)) // len(found)):
            knobs = _change(best[2], cap, dice)
            result = attempt(knobs)
            if result and result[0] <= best[0]:  # along equals too: plateaus are wide
                best = (*result, knobs)
        found[walk] = best

    candidates = [best[:2] for best in found]
    for builder in (zb_h1, zb_h2):
        known = builder(pp, microbatches)
        if peak_memory(known, memory) <= limit * (1 + _SLACK):
            candidates.append((score(known), replace(known, name="zb_auto")))
    if not candidates:
        raise ScheduleError(
            f"zb_auto: no schedule found for pp={pp}, microbatches={microbatches} within "
            f"memory_limit={memory_limit} ({limit:g}): raise it."
        )
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _objective(name: str, costs: Costs, transfer_ticks: int) -> Callable[[Schedule], float]:
    def span(schedule: Schedule) -> float:
        return max(line[-1][1] - line[0][0] for line in clock(schedule, costs))

    def makespan(schedule: Schedule) -> float:
        return max(line[-1][1] for line in clock(schedule, costs))

    def lockstep(schedule: Schedule) -> float:
        grid = place(schedule, transfer_ticks=transfer_ticks)
        return lockstep_cost(grid, costs, transfer_ticks)

    known = {"span": span, "makespan": makespan, "lockstep": lockstep}
    if name not in known:
        raise ScheduleError(f"unknown objective {name!r}: use one of {', '.join(known)}.")
    return known[name]


def peak_memory(schedule: Schedule, memory: Memory) -> float:
    """Most that any rank holds at once, in the unit of `memory`."""
    change = {Op.F: memory.F, Op.B: memory.B, Op.W: memory.W, Op.BW: memory.B + memory.W}
    peak = 0.0
    for order in schedule.ranks:
        held = 0.0
        for cell in order:
            for action in cell.actions:
                held += change[action.op]
                peak = max(peak, held)
    return peak


def _limit(limit: str | float, pp: int, memory: Memory) -> float:
    if isinstance(limit, str):
        if limit not in ("1p", "2p"):
            raise ScheduleError(f"memory_limit={limit!r}: use '1p', '2p' or a number.")
        return int(limit[0]) * pp * memory.F
    return limit


def _grid(pp: int, cap: int) -> list[_Knobs]:
    """The same choices on all ranks, warm-ups falling along the ranks; likely ones first."""
    slopes = [(slope, shift) for slope in (2, 1, 1.5, 2.5, 3, 1.25, 1.75) for shift in (0, -1, 1)]
    warmups = [
        tuple(max(1, min(cap, int(slope * (pp - r)) + shift)) for r in range(pp))
        for slope, shift in slopes
    ]
    warmups = list(dict.fromkeys([*warmups, (cap,) * pp]))
    return [
        _Knobs(warmup, (fill,) * pp, (delay,) * pp, (eager,) * pp)
        for fill, delay, eager, warmup in product((1, 0, 2), (True, False), (True, False), warmups)
    ]


def _change(knobs: _Knobs, cap: int, dice: random.Random) -> _Knobs:
    """One to three choices of single ranks made anew."""
    lists = [list(knobs.warmup), list(knobs.fill), list(knobs.delay), list(knobs.eager)]
    for _ in range(dice.choice((1, 1, 2, 3))):
        rank, kind = dice.randrange(len(knobs.warmup)), dice.randrange(4)
        if kind == 0:
            lists[0][rank] = max(1, min(cap, lists[0][rank] + dice.choice((-1, 1))))
        elif kind == 1:
            lists[1][rank] = dice.randrange(3)
        else:
            lists[kind][rank] = not lists[kind][rank]
    return _Knobs(*map(tuple, lists))


class _Greedy:
    """Simulates all ranks in time order; each decides what to do with what it knows by then."""

    def __init__(
        self,
        pp: int,
        microbatches: int,
        costs: Costs,
        memory: Memory,
        limit: float,
        knobs: _Knobs,
    ):
        self.pp, self.m, self.knobs, self.memory = pp, microbatches, knobs, memory
        self.limit = limit * (1 + _SLACK)
        self.transfer = costs.transfer
        self.time = {
            op: [costs.of(Action(op, r, 0)) for r in range(pp)] for op in (Op.F, Op.B, Op.W)
        }
        self.orders: list[list[Action]] = [[] for _ in range(pp)]
        self.done = {op: [0] * pp for op in (Op.F, Op.B, Op.W)}
        self.free = [0.0] * pp  # when a rank may decide again
        self.held = [0.0] * pp
        self.idle = [0.0] * pp
        self.y_at: list[list[float]] = [[] for _ in range(pp)]  # when inputs of F arrive, if known
        self.dy_at: list[list[float]] = [[] for _ in range(pp)]
        self.y_at[0] = [0.0] * microbatches
        self.events = [(0.0, r) for r in range(pp)]
        heapq.heapify(self.events)

    def run(self) -> list[list[Action]] | None:
        """The orders, or None where the rules run into a deadlock."""
        left = 3 * self.pp * self.m
        while self.events and left:
            now, rank = heapq.heappop(self.events)
            if now < self.free[rank] or self.done[Op.W][rank] == self.m:
                continue
            op = self._choose(rank, now)
            if op is not None:
                self._start(rank, op, now)
                left -= 1
        return None if left else self.orders

    def _choose(self, rank: int, now: float) -> Op | None:
        """What a free rank does at this moment; None waits for the next event."""
        knobs, done = self.knobs, self.done
        f_at = self._arrival(self.y_at[rank], done[Op.F][rank])
        full = self.held[rank] + self.memory.F > self.limit
        warm = not done[Op.B][rank] and done[Op.F][rank] >= knobs.warmup[rank]
        blocked = full and f_at < now + self.time[Op.W][rank]
        if full or warm:
            f_at = _NEVER
        b_at = self._arrival(self.dy_at[rank], done[Op.B][rank])
        last = self.orders[rank][-1].op if self.orders[rank] else None
        if b_at <= now and f_at <= now:
            return Op.B if knobs.eager[rank] or last is not Op.B else Op.F
        if b_at <= now:
            return Op.B
        if f_at <= now:
            holds_up = done[Op.B][rank] > 0 and b_at < now + self.time[Op.F][rank]
            if knobs.delay[rank] or not holds_up:
                return Op.F
        if done[Op.W][rank] < done[Op.B][rank]:
            gap = min(b_at, f_at if f_at > now else _NEVER) - now
            fits = gap >= self.time[Op.W][rank]
            worst = self.idle[rank] + gap >= max(self.idle)
            if fits or blocked or knobs.fill[rank] == 2 or (knobs.fill[rank] == 1 and worst):
                return Op.W
        return None

    def _arrival(self, known: list[float], index: int) -> float:
        return known[index] if index < len(known) else _NEVER

    def _start(self, rank: int, op: Op, now: float) -> None:
        """Do it: the clock, the memory, and what it makes known to others."""
        m = self.done[op][rank]
        self.done[op][rank] += 1
        end = now + self.time[op][rank]
        if self.orders[rank]:
            self.idle[rank] += now - self.free[rank]
        self.free[rank] = end
        self.held[rank] += {Op.F: self.memory.F, Op.B: self.memory.B, Op.W: self.memory.W}[op]
        self.orders[rank].append(Action(op, rank, m))
        heapq.heappush(self.events, (end, rank))
        if op is Op.F and rank == self.pp - 1:
            self.dy_at[rank].append(end)
        elif op is Op.F:
            self._tell(rank + 1, self.y_at, end, now)
        elif op is Op.B and rank:
            self._tell(rank - 1, self.dy_at, end, now)

    def _tell(self, rank: int, known: list[list[float]], end: float, now: float) -> None:
        """An input of a neighbour will arrive: it may decide again now, and when it is there."""
        known[rank].append(end + self.transfer)
        heapq.heappush(self.events, (now, rank))
        heapq.heappush(self.events, (end + self.transfer, rank))
