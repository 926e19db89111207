"""Fused steps: several steps in one schedule, with the optimizer update of a stage as an action U.

A rank that has computed all its gradients of a step updates its stages and starts the warm-up of
the next step while other ranks still drain. `zb_h2` gains from this, because its ranks start and
end one after the other (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4). The order
on every rank does not change, and neither does its memory.
"""

from jaxpipe.core.schedule.action import Action, Cell, Op, Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.scan import optimize_pace, scan_time


def fuse_steps(schedule: Schedule, steps: int) -> Schedule:
    """Return a schedule of consecutive `steps`; microbatch m of step k has the number k M + m.

    Raises `ScheduleError` for less than one step, and where a stage is on two ranks, which would
    have to all-reduce its gradients before an update.

    >>> from jaxpipe.schedules import build, draw_timeline
    >>> print(draw_timeline(fuse_steps(build("zb_h2", pp=2, microbatches=3), 2)))
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
            _move_to_step(cell, first, first + length - 1 if ends else None)
            for first in range(0, steps * length, length)
            for cell, ends in zip(order, _completes_stage(order))
        )
        for order in schedule.ranks
    )
    return Schedule(
        schedule.name, schedule.placement, steps * length, orders, schedule.slices,
        updates=steps,
    )  # fmt: skip


def _completes_stage(order: tuple[Cell, ...]) -> list[bool]:
    """Return for every cell of a rank whether it completes the weight gradients of a stage."""
    gradients = [cell.gradient for cell in order]
    stages = [action.stage if action and action.op.computes_dw else None for action in gradients]
    last = {stage: at for at, stage in enumerate(stages)}
    return [stage is not None and last[stage] == at for at, stage in enumerate(stages)]


def _move_to_step(cell: Cell, first: int, last: int | None) -> Cell:
    """Return a cell in the step that starts with microbatch `first`.

    With `last`, the last microbatch of the step, the cell gets the update of its stage.
    """
    forward, gradient, _, recompute = (
        action and action._replace(microbatch=first + action.microbatch) for action in cell
    )
    update = Action(Op.U, gradient.stage, last) if gradient and last is not None else None
    return Cell(forward, gradient, update, recompute)


def fusion_gain(schedule: Schedule, steps: int, costs: Costs, lockstep: Lockstep = PLAIN) -> float:
    """Return the share of the scan's time that fusing `steps` saves over separate steps.

    Both times include the updates. A lockstep with `every` above 1 is paced again for the fused
    schedule. Raises `ScheduleError` as `fuse_steps` and `scan_time` do.

    >>> from jaxpipe.schedules import build
    >>> h1, h2 = (build(name, pp=8, microbatches=32) for name in ("zb_h1", "zb_h2"))
    >>> [f"{fusion_gain(schedule, 4, Costs()):.1%}" for schedule in (h1, h2)]
    ['0.0%', '5.1%']
    """
    fused, single = fuse_steps(schedule, steps), fuse_steps(schedule, 1)
    repaced = optimize_pace(fused, costs, lockstep) if lockstep.every > 1 else lockstep
    return 1 - scan_time(fused, costs, repaced) / (steps * scan_time(single, costs, lockstep))
