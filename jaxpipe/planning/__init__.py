"""What a run would cost under every schedule, before any device is used. Importing needs no jax."""

from jaxpipe.planning.advice import Advice, advise
from jaxpipe.planning.candidates import arrange_variant
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.estimate import Estimate, estimate, estimates, overlapped
from jaxpipe.planning.cost.hardware import (
    ITEMSIZE,
    Hardware,
    LayerSeconds,
    OpSeconds,
    analytic,
    op_seconds,
    own_costs,
    read_own,
    write_own,
)
from jaxpipe.planning.cost.memory import RankBytes, layout_of, rank_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.fewer import resolve_on_fewer
from jaxpipe.planning.resolve import RunPlan, arrange, resolve
from jaxpipe.planning.table import Plan

__all__ = [
    "ITEMSIZE",
    "Advice",
    "Devices",
    "Estimate",
    "Hardware",
    "LayerSeconds",
    "OpSeconds",
    "Plan",
    "RankBytes",
    "RunPlan",
    "advise",
    "analytic",
    "arrange",
    "arrange_variant",
    "costs_of",
    "estimate",
    "estimates",
    "layout_of",
    "op_seconds",
    "overlapped",
    "own_costs",
    "rank_bytes",
    "read_own",
    "resolve",
    "resolve_on_fewer",
    "write_own",
]
