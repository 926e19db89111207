"""Pipeline schedules as data: built, proved, simulated, and lowered to integer tables.

Pure Python and numpy; this package does not import jax. "Rank" means pipeline rank throughout.
"""

from jaxpipe.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError, label
from jaxpipe.schedule.assignment import assign_layers, compute_layer_assignment
from jaxpipe.schedule.builders import build, check_memory, forward_only
from jaxpipe.schedule.cells import Costs, Memory
from jaxpipe.schedule.custom import read, write
from jaxpipe.schedule.draw import timeline
from jaxpipe.schedule.families import (
    BUILDERS,
    FAMILIES,
    NAMES,
    Family,
    Sizes,
    Variant,
    family_of,
)
from jaxpipe.schedule.fused import fused, time_saved
from jaxpipe.schedule.lifetimes import Buffers
from jaxpipe.schedule.lockstep import Lockstep
from jaxpipe.schedule.lower import Pair, Tables, lower
from jaxpipe.schedule.problem import LIMITS
from jaxpipe.schedule.row import Row
from jaxpipe.schedule.simulate import Report, peak_memory, simulate
from jaxpipe.schedule.validate import validate

__all__ = [
    "BUILDERS",
    "FAMILIES",
    "LIMITS",
    "NAMES",
    "Action",
    "Buffers",
    "Cell",
    "Costs",
    "Family",
    "Lockstep",
    "Memory",
    "Op",
    "Pair",
    "Placement",
    "Report",
    "Row",
    "Schedule",
    "ScheduleError",
    "Sizes",
    "Tables",
    "Variant",
    "assign_layers",
    "build",
    "check_memory",
    "compute_layer_assignment",
    "family_of",
    "forward_only",
    "fused",
    "label",
    "lower",
    "peak_memory",
    "read",
    "simulate",
    "time_saved",
    "timeline",
    "validate",
    "write",
]
