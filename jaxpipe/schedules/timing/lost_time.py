"""Which pipeline rank, op or link made a recorded step slow, and by how much.

The scan is simulated with the measured time of every cell, and again with the cells of one kind on
one rank as fast as their peers are. The difference is the time that this kind costs. Time that
others would have waited anyway is thus not counted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from jaxpipe.core.schedule.action import Cell, Schedule
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.lanes import list_permute_pairs
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.placing import Grid, place_cells
from jaxpipe.core.schedule.scan import cell_starts, scan_waits
from jaxpipe.schedules.timing.recording import Tick

LINK, ALL = "link", "all ops"
_MAIN_SHARE = 0.8  # of a rank's lost time: an op that costs more is named as its cause
Place = tuple[int, int]  # pipeline rank and replica


@dataclass(frozen=True)
class RankSeconds:
    """Measured times of one pipeline rank in a step [s].

    Attributes:
      compute: median time of a cell by its kind (`cell_kind`); "": idle.
      exchange: time of the permutes of every tick, with the wait for neighbours.
    """

    compute: Mapping[str, float]
    exchange: Sequence[float]

    @classmethod
    def of(cls, ticks: Sequence[Tick]) -> "RankSeconds":
        """The times of a rank's recorded ticks."""
        kinds: dict[str, list[float]] = {}
        for tick in ticks:
            kinds.setdefault(cell_kind(tick.cell), []).append(tick.end - tick.compute_begin)
        compute = {kind: median(seconds) for kind, seconds in kinds.items()}
        return cls(compute, [tick.compute_begin - tick.begin for tick in ticks])


@dataclass(frozen=True)
class LostTime:
    """Time that a step would save if one thing were as fast as its peers.

    Attributes:
      seconds: the time [s].
      pp_rank: pipeline rank; of a link the lower one.
      replica: number of the replica.
      cause: ops of the cells that cost most of it, such as "F" or "F+BW"; `ALL` or `LINK`.
    """

    seconds: float
    pp_rank: int
    replica: int
    cause: str


def cell_kind(cell: Cell) -> str:
    """Return ops and stages of a cell, such as "F@0+BW@3"; "" for an idle one."""
    return "+".join(f"{action.op.name}@{action.stage}" for action in cell.actions)


@dataclass(frozen=True)
class MeasuredScan:
    """Simulates the scan of a schedule with measured times.

    Attributes:
      schedule, lockstep: of the run.
      grid: the cells that were recorded, `[T][P]`.
      planned: planned times, in any unit.
    """

    schedule: Schedule
    lockstep: Lockstep
    grid: Grid
    planned: Costs

    def lost_times(self, measured: Mapping[Place, RankSeconds]) -> list[LostTime]:
        """Return the ranks and links that are slower than their peers, the most expensive first.

        Peers of a kind of cell are the same cells of other replicas. With one replica they are
        cells with the same ops on other ranks, relative to the planned times. Peers of a link are
        the other links. Links are compared only where a permute does not synchronize all ranks.
        """
        losses = []
        for replica in sorted({replica for _, replica in measured}):
            ranks = [measured[rank, replica] for rank in range(self.schedule.pp)]
            links = self._links(ranks)
            compute = [dict(rank.compute) for rank in ranks]
            takes = self._seconds(compute, links)
            for rank, kinds in enumerate(compute):
                usual = {
                    kind: min(seconds, self._expected(measured, (rank, replica), kind))
                    for kind, seconds in kinds.items()
                }
                by_cause = {ALL: usual}
                for ops in {_ops(kind) for kind in usual if usual[kind] < kinds[kind]}:
                    by_cause[ops] = {k: t if _ops(k) == ops else kinds[k] for k, t in usual.items()}
                costs = {
                    cause: takes - self._seconds([*compute[:rank], of, *compute[rank + 1 :]], links)
                    for cause, of in by_cause.items()
                }
                main = max(costs, key=lambda cause: (cause != ALL) * costs[cause])
                if costs[ALL] > 0:
                    cause = main if costs[main] > _MAIN_SHARE * costs[ALL] else ALL
                    losses.append(LostTime(costs[ALL], rank, replica, cause))
            for pair, seconds in links.items():
                others = [other for at, other in links.items() if at != pair]
                if others and seconds > (expected := median(others)):
                    lost = takes - self._seconds(compute, links | {pair: expected})
                    losses.append(LostTime(lost, min(pair), replica, LINK))
        return sorted(losses, key=lambda lost: -lost.seconds)

    def late_start(self, rank: int, seconds: float, step_seconds: float) -> float:
        """Return the time that a step of `step_seconds` loses if a rank starts `seconds` late."""
        planned = [{cell_kind(c): self.planned.cell_time(c) for c in col} for col in self._columns]
        usual, late = self._seconds(planned, {}), np.zeros(self.schedule.pp)
        late[rank] = seconds * usual / step_seconds
        return (self._seconds(planned, {}, late) - usual) / usual * step_seconds

    @cached_property
    def _columns(self) -> list[list[Cell]]:
        """The cells of every rank."""
        return [[row[rank] for row in self.grid] for rank in range(self.schedule.pp)]

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, int]]:
        routes = list_permute_pairs(self.schedule, self.lockstep.phases)
        both = (pair for phase in routes for pairs in phase.values() for pair in pairs)
        return frozenset((min(pair), max(pair)) for pair in both)

    def _links(self, ranks: Sequence[RankSeconds]) -> dict[tuple[int, int], float]:
        """The time of a message of every pair: of the two ranks the later one does not wait."""
        if self.lockstep.synchronizes_all:
            return {}
        return {
            (a, b): median(map(min, ranks[a].exchange, ranks[b].exchange)) for a, b in self._pairs
        }

    def _seconds(
        self,
        compute: Sequence[Mapping[str, float]],
        links: Mapping[tuple[int, int], float],
        late: np.ndarray | float = 0.0,
    ) -> float:
        """The time of the scan from these times of cells and links; `late` is when ranks start."""
        kinds = [[cell_kind(cell) for cell in cells] for cells in self._columns]
        times = np.array([[of[k] for k in column] for of, column in zip(compute, kinds)]).T
        transfer = np.zeros(self.schedule.pp)
        for pair, seconds in links.items():
            for rank in pair:
                transfer[rank] = max(transfer[rank], seconds)
        waits, meetings = scan_waits(
            self.schedule, place_cells(self.schedule, self.lockstep), self.lockstep
        )
        # The permute of the first tick already waits for ranks that start late.
        before = np.zeros((self.lockstep.phases, self.schedule.pp))
        before[-1] = late
        meetings = [tick + len(before) for tick in meetings]
        times = np.vstack([before, times])
        starts = cell_starts(times, waits, transfer, self.lockstep.transfer_ticks, meetings)
        return float((starts[-1] + times[-1]).max())

    def _expected(self, measured: Mapping[Place, RankSeconds], at: Place, kind: str) -> float:
        """The time of a kind of cell by its peers; its own if it has none or is idle."""
        rank, replica = at
        own = measured[at].compute[kind]
        same = [of.compute[kind] for (r, d), of in measured.items() if r == rank and d != replica]
        if same or not kind:
            return median(same) if kind else own
        planned = {
            cell_kind(cell): self.planned.cell_time(cell) for row in self.grid for cell in row
        }
        ratios = [
            seconds / planned[other]
            for (r, _), of in measured.items()
            for other, seconds in of.compute.items()
            if r != rank and _ops(other) == _ops(kind)
        ]
        return median(ratios) * planned[kind] if ratios else own


def _ops(kind: str) -> str:
    return re.sub(r"@\d+", "", kind)
