"""Schedules by name."""

from inspect import signature

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.dualpipe import dualpipe, dualpipev
from jaxpipe.schedule.loop import (
    bfs,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)

BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "bfs": bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


def build(name: str, *, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """The named schedule, in any case, for `pp` ranks and `microbatches` microbatches a step.

    `virtual_stages` is the number of stages a rank, for the schedules that leave it open.

    Raises `ScheduleError` for an unknown name, sizes below one or that the schedule cannot have.
    """
    name = name.lower()
    if name not in BUILDERS:
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(BUILDERS)}.")
    sizes = {"pp": pp, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for key, size in sizes.items():
        if size is not None and size < 1:
            raise ScheduleError(f"{name}: {key}={size} must be at least 1.")
    if virtual_stages is None:
        return BUILDERS[name](pp, microbatches)
    flexible = [n for n in BUILDERS if "virtual_stages" in signature(BUILDERS[n]).parameters]
    if name not in flexible:
        raise ScheduleError(
            f"{name} has a fixed number of stages a rank: leave virtual_stages={virtual_stages} "
            f"out, or use one of {', '.join(flexible)}."
        )
    return BUILDERS[name](pp, microbatches, virtual_stages)


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Every microbatch forward through every stage and nothing else: evaluation.

    >>> forward_only(Placement.loop(2), 2).orders()
    [['0F0', '0F1'], ['1F0', '1F1']]
    """
    orders: list[list[Action]] = [[] for _ in range(placement.pp)]
    for stage in range(placement.stages):
        for m in range(microbatches):
            orders[placement.rank(stage, m)].append(Action(Op.F, stage, m))
    return Schedule.of("forward_only", placement, microbatches, orders)
