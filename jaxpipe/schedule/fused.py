"""Steps that overlap: so many in one schedule, each stage updated where its gradients are whole.

The update is an action, U. A rank that has made its gradients of a step updates its stages and
begins the next step's warm-up while others still drain. So the parallelogram of `zb_h2` pays, whose
ranks begin and end one after the other (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section
4). The order on every rank stays as it is, and with it what a rank holds.
"""

from jaxpipe.schedule.action import Action, Cell, Op, Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs
from jaxpipe.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.schedule.scan import paced, scan_time


def fused(schedule: Schedule, steps: int) -> Schedule:
    """So many steps of a schedule in turn; microbatch m of step k is k M + m.

    Raises `ScheduleError` for less than one step, and where a stage is on two ranks: before an
    update these would exchange what they have of its gradients.

    >>> from jaxpipe.schedule import build, timeline
    >>> print(timeline(fused(build("zb_h2", pp=2, microbatches=3), 2)))
    rank 0 | F0 F1 F2 B0 W0 B1 W1 B2 W2+U2 F3    F4 F5 B3 W3 B4 W4 B5 W5+U5 .
    rank 1 | .  F0 B0 F1 B1 F2 B2 W0 W1    W2+U2 F3 B3 F4 B4 F5 B5 W3 W4    W5+U5
    """
    if steps < 1:
        raise ScheduleError(f"{schedule.name}: steps={steps} must be at least 1.")
    if schedule.placement.mirrored_from is not None:
        raise ScheduleError(
            f"{schedule.name} has every stage on two ranks, which exchange their gradients before "
            f"an update: its steps do not overlap."
        )
    length = schedule.microbatches
    orders = tuple(
        tuple(
            _of_step(cell, first, first + length - 1 if ends else None)
            for first in range(0, steps * length, length)
            for cell, ends in zip(order, _ends(order))
        )
        for order in schedule.ranks
    )
    return Schedule(
        schedule.name, schedule.placement, steps * length, orders, schedule.slices,
        updates=steps,
    )  # fmt: skip


def _ends(order: tuple[Cell, ...]) -> list[bool]:
    """Of every cell of a rank whether it makes the last gradient of a stage's weights."""
    makes = [cell.gradient is not None and cell.gradient.op.gives_dw for cell in order]
    last = {cell.gradient.stage: at for at, cell in enumerate(order) if makes[at]}
    return [makes[at] and last[cell.gradient.stage] == at for at, cell in enumerate(order)]


def _of_step(cell: Cell, first: int, last: int | None) -> Cell:
    """A cell in the step whose microbatches begin with `first`; with the update after `last`."""
    forward, gradient, _ = (
        action and action._replace(microbatch=first + action.microbatch) for action in cell
    )
    update = None if last is None else Action(Op.U, gradient.stage, last)
    return Cell(forward, gradient, update)


def time_saved(schedule: Schedule, steps: int, costs: Costs, lockstep: Lockstep = PLAIN) -> float:
    """Share of the scan's time that goes if so many steps overlap, and are not one after the other.

    Both have their updates. A lockstep that keeps cells to every so many ticks is paced anew for
    the steps together. Raises what `fused` and `scan_time` raise.

    >>> from jaxpipe.schedule import build
    >>> h1, h2 = (build(name, pp=8, microbatches=32) for name in ("zb_h1", "zb_h2"))
    >>> [f"{time_saved(schedule, 4, Costs()):.1%}" for schedule in (h1, h2)]
    ['0.0%', '5.1%']
    """
    together, alone = fused(schedule, steps), fused(schedule, 1)
    anew = paced(together, costs, lockstep) if lockstep.every > 1 else lockstep
    return 1 - scan_time(together, costs, anew) / (steps * scan_time(alone, costs, lockstep))
