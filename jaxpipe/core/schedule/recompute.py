"""Recompute residuals ahead of B, in ticks in which a rank is idle.

With full rematerialisation F keeps little, and B computes the forward of its stage again before its
own work. That needs nothing of the next stage, so a rank that waits for the gradient at its output
can do it while it waits. R is that action: it reads what F kept, computes the stage again and
writes the residuals that B and W read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.core.schedule.action import Action, Cell, Op, Schedule
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.lifetimes import SlotKey, action_key
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.placing import place, place_cells
from jaxpipe.core.schedule.scan import cell_starts, scan_waits

Cells = tuple[Cell, ...]  # of one rank, by tick


def recompute_ahead(
    schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN
) -> tuple[Schedule, Lockstep]:
    """Return the schedule with an R for each B and BW, and the lockstep without `in_flight`.

    The new order of a rank is that of its cells in the grid of `place`, so `place` gives the same
    ticks again. On each rank R runs while the rank is idle between F and B, if it is and the scan
    then takes no longer, else in the cell of B. A rank recomputes at most one microbatch
    ahead, so the recomputed residuals of one microbatch are live more than without R, whatever the
    number of microbatches.

    Raises `ScheduleError` as `scan_starts` does.

    >>> from jaxpipe.core.schedule import label, one_f_one_b
    >>> schedule, _ = recompute_ahead(one_f_one_b(pp=2, microbatches=2), Costs(R=1))
    >>> for order in schedule.ranks:
    ...     print(*(label(*cell.actions, stages=False) for cell in order))
    F0 F1 R0 BW0 R1 BW1
    F0 R0+BW0 F1 R1+BW1
    """
    grid = place(schedule, lockstep)
    waits, meetings = scan_waits(schedule, place_cells(schedule, lockstep), lockstep)
    meetings, taking = list(meetings), _memoize_cell_time(costs)

    def end(ranks: Sequence[Cells]) -> float:
        times = np.array([[taking(cell) for cell in cells] for cells in ranks]).T
        starts = cell_starts(times, waits, costs.transfer, lockstep.transfer_ticks, meetings)
        return float((starts[-1] + times[-1]).max())

    columns = list(zip(*grid))
    behind, ahead = ([_with_r(cells, ahead=how) for cells in columns] for how in (False, True))
    chosen = min(ahead, behind, key=end)
    for rank, others in enumerate(zip(ahead, behind)):
        chosen = min(
            ([*chosen[:rank], other, *chosen[rank + 1 :]] for other in (chosen[rank], *others)),
            key=end,
        )
    ranks = tuple(tuple(cell for cell in cells if cell.actions) for cells in chosen)
    return replace(schedule, ranks=ranks), replace(lockstep, in_flight=None)


def _with_r(cells: Cells, *, ahead: bool) -> Cells:
    """Return the cells of a rank with an R for each B and BW, in an idle tick if `ahead`."""
    new = list(cells)
    forwards: dict[SlotKey, int] = {}
    idle = -1  # first tick of the latest gap since the last B or BW: where `place` puts R
    for tick, cell in enumerate(cells):
        if ahead and not cell.actions and (tick == 0 or cells[tick - 1].actions):
            idle = tick
        if cell.forward:
            forwards[action_key(cell.forward)] = tick
        if cell.gradient and cell.gradient.op.computes_dx:
            key = action_key(cell.gradient)
            at = idle if idle > forwards[key] else tick
            new[at] = new[at]._replace(recompute=Action(Op.R, *key))
            idle = -1
    return tuple(new)


def _memoize_cell_time(costs: Costs) -> Callable[[Cell], float]:
    """Return a memoized `costs.cell_time`, which ignores microbatches."""
    times: dict[tuple[tuple[Op, int] | None, ...], float] = {}

    def cell_time(cell: Cell) -> float:
        key = tuple(action and action[:2] for action in cell)
        if key not in times:
            times[key] = costs.cell_time(cell)
        return times[key]

    return cell_time
