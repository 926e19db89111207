"""Build schedules by name, and check their memory."""

from typing import Any

from jaxpipe.core.schedule.action import Schedule, ScheduleError
from jaxpipe.core.schedule.cells import MemoryCosts
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.simulate import peak_memory
from jaxpipe.schedules.families import FAMILIES, ScheduleFamily, find_family
from jaxpipe.schedules.search.problem import SLACK, at_least
from jaxpipe.schedules.search.target import OBJECTIVES, Target, check_objective, limit_in_units


def build(
    name: str,
    *,
    pp: int,
    microbatches: int,
    memory: MemoryCosts | None = None,
    memory_limit: str | float | None = None,
    **options: Any,
) -> Schedule:
    """Build the schedule of a family for `pp` ranks.

    Args:
      name: name of the family, in any case.
      pp: number of pipeline ranks.
      microbatches: microbatches per step.
      memory: memory of the ops; by default every (microbatch, stage) pair takes 1 from F to W.
      memory_limit: limit per rank in the unit of `memory`, which may be bytes, or "1p" or "2p": P
        or 2P microbatches through a rank's stages, counted from F to B. Searched schedules are
        optimized within it (default of zb_auto: "2p"); others must satisfy it.
      options: options of the family; None is as if the option were not given:
        virtual_stages: stages per rank, for families in which it is free.
        slices: sequence slices per microbatch, each of which counts as a microbatch of the
          schedule; for the loop placement.
        costs, objective: what zb_auto, zbv, v_half and v_min are searched for (`Target`); other
          families ignore them.
        lockstep, effort, unsplit_costs: for the searched families only (`Target`).
        breadth: microbatches that a rank runs through one stage before its next; for `bfs` and the
          interleaved families.
        path: for `custom`, a file in the format of `read`.

    Raises `ScheduleError` for an unknown name or option, a size that is below one or not allowed in
    the family, and a memory limit that the schedule exceeds.
    """
    family = find_family(name)
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
    memory = memory or MemoryCosts()
    if family.is_searched:
        options["target"] = Target(memory=memory, memory_limit=memory_limit, **target)
    schedule = family.builder(pp, microbatches, **options)
    if memory_limit is not None:
        check_memory(schedule, memory, memory_limit)
    return schedule


_TARGET = ("costs", "objective", "lockstep", "effort", "unsplit_costs")


def _check_options(family: ScheduleFamily, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if not family.has_option(option) and option not in ("costs", "objective"):
            takers = [other.name for other in FAMILIES.values() if other.has_option(option)]
            raise ScheduleError(
                f"{family.name} has no {option}: leave {option}={value!r} out"
                + (f", or use one of {', '.join(takers)}." if takers else ".")
            )


def check_memory(
    schedule: Schedule, memory: MemoryCosts, memory_limit: str | float, lockstep: Lockstep = PLAIN
) -> None:
    """Raise `ScheduleError` where a schedule, as the scan runs it, exceeds a memory limit."""
    limit = limit_in_units(memory_limit, schedule.placement, memory)
    peak = max(peak_memory(schedule, memory, lockstep))
    if peak > limit * (1 + SLACK):
        raise ScheduleError(
            f"{schedule.name} holds up to {peak:g} on a rank, more than memory_limit="
            f"{memory_limit}: the least that works for it is {at_least(peak)}; zb_auto, v_half and "
            f"v_min need less."
        )
