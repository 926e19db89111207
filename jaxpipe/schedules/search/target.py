"""What a schedule search minimizes, and within which memory."""

from dataclasses import dataclass

from jaxpipe.core.schedule.action import Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs, MemoryCosts
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.scan import scan_time

OBJECTIVES = ("scan", "span", "makespan")
LIMITS = ("1p", "2p")


def check_objective(name: str) -> None:
    """Raise `ScheduleError` for an unknown objective."""
    if name not in OBJECTIVES:
        raise ScheduleError(f"unknown objective {name!r}: use one of {', '.join(OBJECTIVES)}.")


def limit_in_units(limit: str | float, placement: Placement, memory: MemoryCosts) -> float:
    """Return a memory limit in the unit of `memory`.

    `"1p"` is P microbatches through a rank's stages, `"2p"` twice as much. Raises `ScheduleError`
    for other strings.
    """
    if not isinstance(limit, str):
        return limit
    if limit not in LIMITS:
        raise ScheduleError(f"memory_limit={limit!r}: use '1p', '2p' or a number.")
    return int(limit[0]) * placement.stages * memory.F


_ALIKE, _STAGES = Costs(), MemoryCosts()


@dataclass(frozen=True)
class Target:
    """The options of a searched schedule, as in `build`.

    Attributes:
      costs: times of the ops, in any one unit.
      unsplit_costs: of a schedule that splits no gradient; None: `costs`.
      memory: memory of F, B and W, in any one unit.
      memory_limit: limit per rank in the unit of `memory`, or "1p", "2p"; None: the family's.
      objective: the time to minimize: "scan", or of asynchronous ranks, "span" (the slowest rank)
        or "makespan".
      lockstep: how the scan places the schedule into ticks.
      effort: approximate number of steps to simulate; None: enough for some seconds.
    """

    costs: Costs = _ALIKE
    memory: MemoryCosts = _STAGES
    memory_limit: str | float | None = None
    objective: str = "scan"
    lockstep: Lockstep = PLAIN
    effort: int | None = None
    unsplit_costs: Costs | None = None

    def scan_time(self, schedule: Schedule) -> float:
        """Return the time of a schedule's scan."""
        unsplit = None if schedule.splits_gradients else self.unsplit_costs
        return scan_time(schedule, unsplit or self.costs, self.lockstep)


ANY_TARGET = Target()
