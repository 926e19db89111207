"""zb_auto: the zero-bubble schedule for measured costs and a memory limit (Qi et al. 2024, 3.1)."""

from dataclasses import replace

from jaxpipe.core.schedule.action import Placement, Schedule
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.orders.loop import one_f_one_b, zb_h1, zb_h2
from jaxpipe.core.schedule.placing import place
from jaxpipe.schedules.search.problem import SearchProblem
from jaxpipe.schedules.search.search import search_schedule
from jaxpipe.schedules.search.target import ANY_TARGET, Target, limit_in_units


def zb_auto(pp: int, microbatches: int, target: Target = ANY_TARGET) -> Schedule:
    """Search for the best schedule that keeps every rank within the memory limit, by default "2p".

    The result is no worse than zb_h1 and zb_h2, where these fit. If the objective is the time of
    the scan, it is also no worse than 1f1b at its own costs (`Target.unsplit_costs`), both in order
    and with forwards that run ahead.

    Raises `ScheduleError` for an unknown objective or limit, and where no microbatch fits the
    limit; the message gives the least limit that works.
    """
    placement = Placement.loop(pp)
    memory_limit = "2p" if target.memory_limit is None else target.memory_limit
    limit = limit_in_units(memory_limit, placement, target.memory)
    problem = SearchProblem("zb_auto", placement, microbatches, limit, target)
    problem.check_limit()
    known = [zb_h1(pp, microbatches), zb_h2(pp, microbatches)]
    known += _build_unsplit(
        pp, microbatches, target.lockstep, min(problem.live_limit, microbatches)
    )
    return replace(search_schedule(problem, effort=target.effort, known=known), name="zb_auto")


def _build_unsplit(
    pp: int, microbatches: int, lockstep: Lockstep, live_limit: int
) -> list[Schedule]:
    """Return 1F1B in order, and as placed with forwards that run ahead within `room`."""
    plain = one_f_one_b(pp, microbatches)
    packed = 2 * pp - (not lockstep.vocab_parallel)
    ahead = [
        place(plain, replace(lockstep, in_flight=n)) for n in {min(packed, live_limit), live_limit}
    ]
    orders = ([[cell for cell in cells if cell.actions] for cells in zip(*grid)] for grid in ahead)
    return [plain, *(replace(plain, ranks=tuple(map(tuple, ranks))) for ranks in orders)]
