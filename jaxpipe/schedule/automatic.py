"""zb_auto: the zero-bubble schedule for measured costs and a memory limit (Qi et al. 2024, 3.1)."""

from jaxpipe.schedule.action import Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs, Memory
from jaxpipe.schedule.loop import zb_h1, zb_h2
from jaxpipe.schedule.problem import Problem, limit_in_units
from jaxpipe.schedule.search import search


def zb_auto(
    pp: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    memory: Memory | None = None,
    memory_limit: str | float = "2p",
    objective: str = "span",
    transfer_ticks: int = 1,
    effort: int | None = None,
) -> Schedule:
    """The best schedule found that keeps every rank within the limit.

    `memory_limit` is `"1p"` or `"2p"` (P or 2P forwards' worth) or a number in the unit of
    `memory`, which may be bytes. `objective` is what shall be short: `"span"` of the slowest rank,
    `"makespan"`, or the `"lockstep"` of the scan with `transfer_ticks`. zb_h1 and zb_h2 stand as
    candidates where they fit, so the result is never worse.

    Raises `ScheduleError` for an unknown objective or limit, and where no microbatch fits the
    limit, with the least that works.
    """
    memory = memory or Memory()
    placement = Placement.loop(pp)
    limit = limit_in_units(memory_limit, placement, memory)
    if limit < memory.F:
        raise ScheduleError(
            f"zb_auto: memory_limit={memory_limit} is less than one forward takes, {memory.F:g}: "
            f"use at least {memory.F:g}."
        )
    problem = Problem(
        "zb_auto", placement, microbatches, costs or Costs(), memory, limit, objective,
        transfer_ticks,
    )  # fmt: skip
    return search(problem, effort=effort, known=[zb_h1(pp, microbatches), zb_h2(pp, microbatches)])
