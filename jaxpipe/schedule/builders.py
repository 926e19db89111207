"""Schedules by name."""

from heapq import heappop, heappush
from typing import Any

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs, Memory
from jaxpipe.schedule.families import FAMILIES, family_of
from jaxpipe.schedule.problem import SLACK, check_objective, limit_in_units
from jaxpipe.schedule.simulate import peak_memory


def build(
    name: str,
    *,
    pp: int,
    microbatches: int,
    virtual_stages: int | None = None,
    slices: int = 1,
    costs: Costs | None = None,
    memory: Memory | None = None,
    memory_limit: str | float | None = None,
    objective: str = "span",
    **options: Any,
) -> Schedule:
    """The named schedule, in any case, for `pp` ranks and `microbatches` microbatches a step.

    `virtual_stages` is the number of stages a rank, for the schedules that leave it open. `slices`
    cuts the sequences of every microbatch in time, each slice then being one of the schedule's
    `microbatches`; the schedules on the loop placement can. `costs`
    and `objective` (`"span"`, `"makespan"` or `"lockstep"`) steer the searched ones, zb_auto, zbv,
    v_half and v_min; the orders of the others do not depend on them. `memory_limit` is what a rank
    may hold, in the unit of `memory` (by default one stage of a microbatch from F to W), so it may
    be bytes; `"1p"` and `"2p"` are P and 2P microbatches through a rank's stages. zb_auto makes
    the best of it (default `"2p"`), of the others it is demanded.

    Further options are the builder's own: `breadth` of `bfs`; `transfer_ticks` and `effort` of the
    searched ones; `path` of `custom`, a file that `read` understands.

    Raises `ScheduleError` for an unknown name or option, sizes below one or that the schedule
    cannot have, and a memory limit that it breaks.
    """
    family = family_of(name)
    name = family.name
    sizes = {"pp": pp, "microbatches": microbatches, "slices": slices}
    sizes["virtual_stages"] = virtual_stages
    for key, size in sizes.items():
        if size is not None and size < 1:
            raise ScheduleError(f"{name}: {key}={size} must be at least 1.")
    check_objective(objective)
    if virtual_stages is not None:
        options["virtual_stages"] = virtual_stages
    if slices > 1:
        options["slices"] = slices
    for option, value in options.items():
        if not family.takes(option):
            takers = [other.name for other in FAMILIES.values() if other.takes(option)]
            raise ScheduleError(
                f"{name} has no {option}: leave {option}={value!r} out"
                + (f", or use one of {', '.join(takers)}." if takers else ".")
            )
    request = {"costs": costs, "memory": memory, "objective": objective}
    if memory_limit is not None:
        request["memory_limit"] = memory_limit
    options |= {key: value for key, value in request.items() if family.takes(key)}
    schedule = family.builder(pp, microbatches, **options)
    if memory_limit is not None:
        _check_memory(schedule, memory or Memory(), memory_limit)
    return schedule


def _check_memory(schedule: Schedule, memory: Memory, memory_limit: str | float) -> None:
    limit = limit_in_units(memory_limit, schedule.placement, memory)
    peak = max(peak_memory(schedule, memory))
    if peak > limit * (1 + SLACK):
        raise ScheduleError(
            f"{schedule.name} holds up to {peak:g} on a rank, more than memory_limit="
            f"{memory_limit}: the least that works for it is {peak:g}; zb_auto, v_half and v_min "
            f"need less."
        )


def forward_only(placement: Placement, microbatches: int, slices: int = 1) -> Schedule:
    """Every microbatch forward through every stage and nothing else: evaluation.

    Every rank takes what has come furthest, so that few messages wait. As in `Schedule`, so many
    `slices` in a row are one sequence.

    >>> forward_only(Placement.loop(2), 2).orders()
    [['0F0', '0F1'], ['1F0', '1F1']]
    """
    orders: list[list[Action]] = [[] for _ in range(placement.pp)]
    ready: list[list[tuple[int, int]]] = [[] for _ in orders]  # heaps of (-stage, microbatch)
    for m in range(microbatches):
        heappush(ready[placement.rank(0, m)], (0, m))
    while any(ready):
        taken = [heappop(heap) if heap else None for heap in ready]
        for order, item in zip(orders, taken):
            if item is not None:
                stage, m = -item[0], item[1]
                order.append(Action(Op.F, stage, m))
                if stage + 1 < placement.stages:
                    heappush(ready[placement.rank(stage + 1, m)], (-stage - 1, m))
    return Schedule.of("forward_only", placement, microbatches, orders, slices)
