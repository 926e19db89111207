"""Schedules on the V placement: rank r has stages r and 2P-1-r, so the loss is on rank 0.

| schedule | live on a rank until W, in (microbatch, stage) pairs | bubble for F = B = W, M large |
|---|---|---|
| zbv | 2P: as much as 1F1B | none, per rank |
| v_half | P + 2: about half | about half of 1F1B's |
| v_min | 2 floor((P + 4) / 3): about a third | about two thirds of 1F1B's |
| 1f1b_v | 2 ceil((2P + 1) / 3): about two thirds | five sixths of 1F1B's or less |

`1f1b_v` splits no gradient and is constructed; the others are searched, under these or other memory
limits. Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 and 4;
the order of `zbv` at equal costs is that of PyTorch's `ScheduleZBVZeroBubble`.
"""

from collections.abc import Callable

from jaxpipe.core.schedule.action import Placement, Schedule
from jaxpipe.core.schedule.orders.vshape import zbv_order
from jaxpipe.schedules.search.problem import SearchProblem
from jaxpipe.schedules.search.search import search_schedule
from jaxpipe.schedules.search.target import ANY_TARGET, Target, limit_in_units

_HELD: dict[str, Callable[[int], int]] = {
    "zbv": lambda pp: 2 * pp,
    "v_half": lambda pp: pp + 2,
    "v_min": lambda pp: 2 * ((pp + 4) // 3),
}


def search_v_shape(name: str, pp: int, microbatches: int, target: Target = ANY_TARGET) -> Schedule:
    """Search for a `zbv`, `v_half` or `v_min` schedule for any costs, within a memory limit.

    The default limit is that of the table above, counted in (microbatch, stage) pairs from F to B,
    or the memory that one microbatch needs alone, where that is more.
    """
    memory, placement = target.memory, Placement.v_shape(pp)
    if target.memory_limit is None:
        limit = max(_HELD[name](pp) * memory.F, 2 * memory.F + memory.b_growth)
    else:
        limit = limit_in_units(target.memory_limit, placement, memory)
    problem = SearchProblem(name, placement, microbatches, limit, target)
    known = [zbv_order(pp, microbatches)] if name == "zbv" else []
    within_a_second = max(80_000, 350_000 - 12 * problem.steps)
    return search_schedule(problem, effort=target.effort or within_a_second, known=known)
