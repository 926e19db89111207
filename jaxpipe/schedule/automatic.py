"""zb_auto: the zero-bubble schedule for measured costs and a memory limit (Qi et al. 2024, 3.1)."""

from jaxpipe.schedule.action import Placement, Schedule
from jaxpipe.schedule.loop import zb_h1, zb_h2
from jaxpipe.schedule.problem import ANY_TARGET, Problem, Target, limit_in_units
from jaxpipe.schedule.search import search


def zb_auto(pp: int, microbatches: int, target: Target = ANY_TARGET) -> Schedule:
    """The best schedule found that keeps every rank within the limit, by default "2p".

    zb_h1 and zb_h2 stand as candidates where they fit, so the result is never worse.

    Raises `ScheduleError` for an unknown objective or limit, and where no microbatch fits the
    limit, with the least that works.
    """
    placement = Placement.loop(pp)
    memory_limit = "2p" if target.memory_limit is None else target.memory_limit
    limit = limit_in_units(memory_limit, placement, target.memory)
    problem = Problem("zb_auto", placement, microbatches, limit, target)
    known = [zb_h1(pp, microbatches), zb_h2(pp, microbatches)]
    return search(problem, effort=target.effort, known=known)
