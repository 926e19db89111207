"""Pipeline schedules as data: orders, proved, simulated, and lowered to integer tables.

Pure Python and numpy; this package does not import jax. "Rank" means pipeline rank throughout.
"""

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError, label
from jaxpipe.core.schedule.assignment import assign_layers, compute_layer_assignment
from jaxpipe.core.schedule.buffers import ScanBuffers, scan_buffers
from jaxpipe.core.schedule.cells import Costs, MemoryCosts
from jaxpipe.core.schedule.lifetimes import Buffers
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.lower import Tables, lower
from jaxpipe.core.schedule.orders import ORDERS
from jaxpipe.core.schedule.orders.bidirectional import dualpipe, dualpipev
from jaxpipe.core.schedule.orders.custom import read_schedule, write_schedule
from jaxpipe.core.schedule.orders.forwards import forward_only
from jaxpipe.core.schedule.orders.loop import (
    bfs,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from jaxpipe.core.schedule.orders.vshape import one_f_one_b_v, zbv_order
from jaxpipe.core.schedule.pairs import OverlapPair
from jaxpipe.core.schedule.recompute import recompute_ahead
from jaxpipe.core.schedule.row import TableRow
from jaxpipe.core.schedule.simulate import SimulationReport, peak_memory, simulate
from jaxpipe.core.schedule.validate import validate

__all__ = [
    "ORDERS",
    "Action",
    "Buffers",
    "Cell",
    "Costs",
    "Lockstep",
    "MemoryCosts",
    "Op",
    "OverlapPair",
    "Placement",
    "ScanBuffers",
    "Schedule",
    "ScheduleError",
    "SimulationReport",
    "TableRow",
    "Tables",
    "assign_layers",
    "bfs",
    "compute_layer_assignment",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "label",
    "lower",
    "one_f_one_b",
    "one_f_one_b_v",
    "peak_memory",
    "read_schedule",
    "recompute_ahead",
    "scan_buffers",
    "simulate",
    "validate",
    "write_schedule",
    "zb_h1",
    "zb_h2",
    "zbv_order",
]
