"""Simulated time and memory of a schedule; it needs no device.

Two models of time. *Asynchronous*: a rank starts an action once it is free and the inputs have
arrived (one program per rank). *Scan*: all ranks execute the same ticks, and wait in each for their
own messages (`scan.py`).

Two bubbles. *Global*: idle share of the time from the first start to the last end over all ranks.
*Span*: idle share of the longest time that one rank takes from its first start to its last end (Qi
et al. 2024, Table 2).
"""

from dataclasses import dataclass

import numpy as np

from jaxpipe.core.schedule.action import Op, Schedule
from jaxpipe.core.schedule.cells import Costs, MemoryCosts
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.placing import place
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.core.schedule.topological_order import cell_kinds, sort_topologically


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation: times in the unit of the costs, bubbles as fractions of a time.

    Attributes:
      makespan: asynchronous time from the first start to the last end over all ranks.
      max_span: asynchronous time of the slowest rank, from its first start to its last end.
      scan_makespan: time of the scan.
      bubble_global, bubble_span, bubble_scan: idle share of these three times; 0 is perfect.
      peak_until_b: per rank, the most live (microbatch, stage) pairs, from F to B or BW.
      peak_until_w: the same from F to W or BW.
    """

    makespan: float
    max_span: float
    scan_makespan: float
    bubble_global: float
    bubble_span: float
    bubble_scan: float
    peak_until_b: tuple[int, ...]
    peak_until_w: tuple[int, ...]


def simulate(
    schedule: Schedule, costs: Costs | None = None, lockstep: Lockstep = PLAIN
) -> SimulationReport:
    """Simulate a schedule, both asynchronously and as the scan runs it under `lockstep`.

    Raises `ScheduleError` where the schedule cannot finish.

    >>> from jaxpipe.core.schedule import one_f_one_b
    >>> report = simulate(one_f_one_b(pp=4, microbatches=8))
    >>> report.makespan, round(report.bubble_global, 4), report.peak_until_w
    (33.0, 0.2727, (4, 3, 2, 1))
    """
    costs = costs or Costs()
    lines = [line for line in asynchronous_times(schedule, costs) if line]
    makespan = max(line[-1][1] for line in lines) - min(line[0][0] for line in lines)
    max_span = max(line[-1][1] - line[0][0] for line in lines)
    scanned = scan_time(schedule, costs, lockstep)
    kinds, examples = cell_kinds(schedule)
    work = float(np.bincount(kinds) @ [costs.cell_time(cell) for cell in examples]) / schedule.pp
    return SimulationReport(
        makespan=makespan,
        max_span=max_span,
        scan_makespan=scanned,
        bubble_global=1 - work / makespan,
        bubble_span=1 - work / max_span,
        bubble_scan=1 - work / scanned,
        peak_until_b=peak_live(schedule, frees=(Op.B, Op.BW)),
        peak_until_w=peak_live(schedule, frees=(Op.W, Op.BW)),
    )


def asynchronous_times(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return start and end of every cell, per rank, if each rank runs as early as it can.

    Raises `ScheduleError` where the schedule cannot finish.
    """
    line, (kinds, examples) = sort_topologically(schedule), cell_kinds(schedule)
    taken, transfer = [costs.cell_time(cell) for cell in examples], costs.transfer
    ends: list[float] = []
    free = [0.0] * schedule.pp
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    for (rank, _, before), kind in zip(line, kinds):
        begin = free[rank]
        for other in before:
            arrives = ends[other] + transfer
            if arrives > begin:
                begin = arrives
        free[rank] = end = begin + taken[kind]
        ends.append(end)
        times[rank].append((begin, end))
    return times


def peak_memory(schedule: Schedule, memory: MemoryCosts, lockstep: Lockstep = PLAIN) -> list[float]:
    """Return the peak memory of each rank, in the unit of `memory`, as the scan runs the schedule.

    With `in_flight` a rank does not keep its order of cells, so the order is that of `place`.
    """
    change = dict.fromkeys(Op, 0.0)
    change |= {Op.F: memory.F, Op.B: memory.B, Op.W: memory.W, Op.BW: memory.B + memory.W}
    slices = schedule.slices
    orders = schedule.ranks if lockstep.in_flight is None else zip(*place(schedule, lockstep))
    peaks = []
    for order in orders:
        live = peak = 0.0
        for op, _, m in (action for cell in order for action in cell.actions):
            enters = m % slices == (0 if op is Op.F else slices - 1)
            live += change[op] + memory.state * (enters and (op is Op.F or op.computes_dx))
            peak = max(peak, live)
            if op.computes_dx and m % slices == 0:
                live -= 2 * memory.state
        peaks.append(peak)
    return peaks


def peak_live(schedule: Schedule, frees: tuple[Op, ...]) -> tuple[int, ...]:
    """Return the most (microbatch, stage) pairs live at once on each rank, in its order."""
    kinds, examples = cell_kinds(schedule)
    enters = np.array([cell.forward is not None for cell in examples], int)[kinds]
    leaves = np.array([cell.gradient is not None and cell.gradient.op in frees
                       for cell in examples], int)[kinds]  # fmt: skip
    ranks = np.array([place.rank for place in sort_topologically(schedule)])
    live = lambda own: np.cumsum(enters[own] - leaves[own]) + leaves[own]  # noqa: E731
    return tuple(int(live(ranks == rank).max(initial=0)) for rank in range(schedule.pp))
