"""Schedules by name."""

from heapq import heappop, heappush
from typing import Any

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Memory
from jaxpipe.schedule.families import FAMILIES, Family, family_of
from jaxpipe.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.schedule.problem import OBJECTIVES, SLACK, Target, check_objective, limit_in_units
from jaxpipe.schedule.simulate import peak_memory


def build(
    name: str,
    *,
    pp: int,
    microbatches: int,
    memory: Memory | None = None,
    memory_limit: str | float | None = None,
    **options: Any,
) -> Schedule:
    """The named schedule, in any case, for `pp` ranks and `microbatches` microbatches a step.

    `memory_limit` is what a rank may hold, in the unit of `memory` (by default one stage of a
    microbatch from F to W), so it may be bytes; `"1p"` and `"2p"` are P and 2P microbatches through
    a rank's stages, counted from F to B. The searched ones make the best of it (zb_auto's default
    is `"2p"`), of the others it is demanded.

    Options, of which None is as if it were not given:
      virtual_stages: stages a rank, for the schedules that leave it open.
      slices: parts of every microbatch's sequences in time, each of which then is one of the
        schedule's microbatches; for schedules on the loop placement.
      costs, objective: what steers the searched ones, zb_auto, zbv, v_half and v_min (`Target`);
        the orders of the others do not depend on them.
      lockstep, effort: of the searched ones alone.
      breadth: microbatches that a rank runs through one stage before its next: of `bfs` and the
        interleaved ones.
      path: of `custom`, a file that `read` understands.

    Raises `ScheduleError` for an unknown name or option, sizes below one or that the schedule
    cannot have, and a memory limit that it breaks.
    """
    family = family_of(name)
    options = {option: value for option, value in options.items() if value is not None}
    sizes = {"pp": pp, "microbatches": microbatches}
    counts = ("slices", "virtual_stages", "breadth")
    sizes |= {key: options[key] for key in counts if key in options}
    for key, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"{family.name}: {key}={size} must be at least 1.")
    if options.get("slices") == 1:
        del options["slices"]
    check_objective(options.get("objective", OBJECTIVES[0]))
    _check_options(family, options)
    target = {option: options.pop(option) for option in _TARGET if option in options}
    memory = memory or Memory()
    if family.searched:
        options["target"] = Target(memory=memory, memory_limit=memory_limit, **target)
    schedule = family.builder(pp, microbatches, **options)
    if memory_limit is not None:
        check_memory(schedule, memory, memory_limit)
    return schedule


_TARGET = ("costs", "objective", "lockstep", "effort")


def _check_options(family: Family, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if not family.takes(option) and option not in ("costs", "objective"):
            takers = [other.name for other in FAMILIES.values() if other.takes(option)]
            raise ScheduleError(
                f"{family.name} has no {option}: leave {option}={value!r} out"
                + (f", or use one of {', '.join(takers)}." if takers else ".")
            )


def check_memory(
    schedule: Schedule, memory: Memory, memory_limit: str | float, lockstep: Lockstep = PLAIN
) -> None:
    """Raise `ScheduleError` where a schedule, as the scan runs it, holds more than a limit."""
    limit = limit_in_units(memory_limit, schedule.placement, memory)
    peak = max(peak_memory(schedule, memory, lockstep))
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
