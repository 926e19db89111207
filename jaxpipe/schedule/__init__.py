"""Pipeline schedules as data: built, proved, simulated, and lowered to integer tables.

Pure Python and numpy; this package does not import jax. "Rank" means pipeline rank throughout.
"""

from jaxpipe.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError, label
from jaxpipe.schedule.assignment import assign_layers, compute_layer_assignment
from jaxpipe.schedule.balance import balance_layers, shorter_and_shorter
from jaxpipe.schedule.builders import build, check_memory, forward_only
from jaxpipe.schedule.cells import Costs, MemoryCosts
from jaxpipe.schedule.custom import read_schedule, write_schedule
from jaxpipe.schedule.draw import draw_timeline
from jaxpipe.schedule.families import (
    BUILDERS,
    FAMILIES,
    NAMES,
    ScheduleFamily,
    ScheduleVariant,
    VariantSizes,
    find_family,
)
from jaxpipe.schedule.fused import fuse_steps, fusion_gain
from jaxpipe.schedule.lifetimes import Buffers
from jaxpipe.schedule.lockstep import Lockstep
from jaxpipe.schedule.lower import OverlapPair, Tables, lower
from jaxpipe.schedule.row import TableRow
from jaxpipe.schedule.simulate import SimulationReport, peak_memory, simulate
from jaxpipe.schedule.target import LIMITS
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
    "Lockstep",
    "MemoryCosts",
    "Op",
    "OverlapPair",
    "Placement",
    "Schedule",
    "ScheduleError",
    "ScheduleFamily",
    "ScheduleVariant",
    "SimulationReport",
    "TableRow",
    "Tables",
    "VariantSizes",
    "assign_layers",
    "balance_layers",
    "build",
    "check_memory",
    "compute_layer_assignment",
    "draw_timeline",
    "find_family",
    "forward_only",
    "fuse_steps",
    "fusion_gain",
    "label",
    "lower",
    "peak_memory",
    "read_schedule",
    "shorter_and_shorter",
    "simulate",
    "validate",
    "write_schedule",
]
