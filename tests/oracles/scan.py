"""The time of the scan by event simulation: every rank is a program that posts, works and waits.

Slow and plain. A message passes once its sender and its receiver have both posted it, and takes
its travel time; neither rank continues past its wait for the tick's messages before that.
"""

import heapq
from collections import defaultdict
from itertools import pairwise

from jaxpipe.core.schedule import Op, lower
from jaxpipe.core.schedule.placing import place


def scan_time(schedule, costs, lockstep):
    """Return the time of the scan, without the first exchange."""
    return _Scan(schedule, costs, lockstep).run()


class _Scan:
    def __init__(self, schedule, costs, lockstep):
        self.schedule, self.costs, self.lockstep = schedule, costs, lockstep
        self.grid = place(schedule, lockstep)
        self.partners = [[set() for _ in range(schedule.pp)] for _ in range(lockstep.phases)]
        for m in range(schedule.microbatches):
            ranks = [schedule.placement.rank(stage, m) for stage in range(schedule.stages)]
            for one, other in pairwise(ranks):
                if one != other:
                    self._join(one, other)
        self.meetings = self._meetings() if lockstep.vocab_parallel else set()
        self.meetings |= set(range(len(self.grid))) if lockstep.synchronizes_all else set()
        if schedule.updates:  # ranks meet where the tables say that a step is validated
            validates = lower(schedule, lockstep).columns.steps.validate
            self.meetings |= {int(tick) + 1 for tick in validates[:, 0].nonzero()[0]}
        self.posted = defaultdict(dict)  # tick -> rank -> when
        self.met = defaultdict(dict)
        self.waiting = []  # (rank, since when, the posted times, ranks that must post, travel time)

    def _join(self, one, other):
        """Make two ranks with consecutive stages meet in every tick of their phase."""
        link = one if (one + 1) % self.schedule.pp == other else other
        of_turn = self.partners[link % self.lockstep.phases]
        of_turn[one].add(other)
        of_turn[other].add(one)

    def _meetings(self):
        last, found = self.schedule.stages - 1, set()
        for tick, row in enumerate(self.grid):
            for action in (action for cell in row for action in cell.actions):
                first_f = action.op is Op.F and action.stage == 0
                last_f = action.op is Op.F and action.stage == last
                returned = action.op.computes_dx and action.stage == 0
                found |= {tick} if first_f else set()
                found |= {tick + 1} if last_f or returned else set()
        return found

    def program(self, rank):
        """Yield the events of a rank, in order."""
        for tick, row in enumerate(self.grid):
            if self.lockstep.transfer_ticks == 1 and tick:
                yield "post", tick
                yield "wait", tick
            if tick in self.meetings and tick:
                yield "meet", tick
            if self.lockstep.transfer_ticks == 2:
                yield "post", tick
            yield "work", self.costs.cell_time(row[rank])
            if self.lockstep.transfer_ticks == 2 and tick + 1 < len(self.grid):
                yield "wait", tick

    def run(self):
        programs = [self.program(rank) for rank in range(self.schedule.pp)]
        events = [(0.0, rank) for rank in range(self.schedule.pp)]
        end = 0.0
        while events:
            now, rank = heapq.heappop(events)
            end = max(end, now)
            kind, what = next(programs[rank], (None, None))
            if kind == "work":
                heapq.heappush(events, (now + what, rank))
            elif kind == "post":
                self.posted[what][rank] = now
                heapq.heappush(events, (now, rank))
            elif kind == "wait":
                needed = {rank, *self.partners[what % self.lockstep.phases][rank]}
                travels = self.costs.transfer if len(needed) > 1 else 0.0
                self.waiting.append((rank, now, self.posted[what], needed, travels))
            elif kind == "meet":
                self.met[what][rank] = now
                everybody = set(range(self.schedule.pp))
                self.waiting.append((rank, now, self.met[what], everybody, 0.0))
            for item in list(self.waiting):
                waiter, since, there, needed, travels = item
                if needed <= there.keys():
                    self.waiting.remove(item)
                    arrival = max(there[other] for other in needed) + travels
                    heapq.heappush(events, (max(since, arrival), waiter))
        assert not self.waiting
        return end
