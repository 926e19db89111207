"""Schedules as data: who computes what in which order, proved and lowered to integer tables.

Pure Python and numpy; nothing here knows jax.
"""

from jaxpipe.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.assignment import assign_layers
from jaxpipe.schedule.builders import BUILDERS, NAMES, build, forward_only
from jaxpipe.schedule.cells import Costs, Memory
from jaxpipe.schedule.custom import read, write
from jaxpipe.schedule.draw import timeline
from jaxpipe.schedule.lockstep import Lockstep
from jaxpipe.schedule.lower import Pair, Tables, lower
from jaxpipe.schedule.row import Row
from jaxpipe.schedule.simulate import Report, peak_memory, simulate
from jaxpipe.schedule.validate import validate

__all__ = [
    "BUILDERS",
    "NAMES",
    "Action",
    "Cell",
    "Costs",
    "Lockstep",
    "Memory",
    "Op",
    "Pair",
    "Placement",
    "Report",
    "Row",
    "Schedule",
    "ScheduleError",
    "Tables",
    "assign_layers",
    "build",
    "forward_only",
    "lower",
    "peak_memory",
    "read",
    "simulate",
    "timeline",
    "validate",
    "write",
]
