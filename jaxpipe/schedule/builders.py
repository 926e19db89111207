"""Schedules by name."""

from functools import partial
from inspect import signature
from typing import Any

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.automatic import zb_auto
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
from jaxpipe.schedule.vshape import v_shaped

BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "bfs": bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_auto": zb_auto,
    "interleaved_zb": interleaved_zb,
    "zbv": partial(v_shaped, "zbv"),
    "v_half": partial(v_shaped, "v_half"),
    "v_min": partial(v_shaped, "v_min"),
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


def build(
    name: str,
    *,
    pp: int,
    microbatches: int,
    virtual_stages: int | None = None,
    **options: Any,
) -> Schedule:
    """The named schedule, in any case, for `pp` ranks and `microbatches` microbatches a step.

    `virtual_stages` is the number of stages a rank, for the schedules that leave it open. Further
    options are the builder's own: `breadth` of `bfs`; `costs`, `memory`, `memory_limit`,
    `objective`, `transfer_ticks` and `effort` of the searched ones.

    Raises `ScheduleError` for an unknown name or option, sizes below one or that the schedule
    cannot have.
    """
    name = name.lower()
    if name not in BUILDERS:
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(BUILDERS)}.")
    if virtual_stages is not None:
        options["virtual_stages"] = virtual_stages
    sizes = {"pp": pp, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for key, size in sizes.items():
        if size is not None and size < 1:
            raise ScheduleError(f"{name}: {key}={size} must be at least 1.")
    for option, value in options.items():
        takers = [n for n in BUILDERS if option in signature(BUILDERS[n]).parameters]
        if name not in takers:
            raise ScheduleError(
                f"{name} has no {option}: leave {option}={value!r} out"
                + (f", or use one of {', '.join(takers)}." if takers else ".")
            )
    return BUILDERS[name](pp, microbatches, **options)


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
