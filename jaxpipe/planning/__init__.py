"""What a run would cost under every schedule, before any device is used. Importing needs no jax."""

from jaxpipe.planning.advice import Advice, advise
from jaxpipe.planning.candidates import Candidate, candidate, configured, sizes_of
from jaxpipe.planning.chosen import Choice, chosen, decided, layers_of, lockstep_of, op_seconds
from jaxpipe.planning.costs import costs_of
from jaxpipe.planning.estimate import Estimate, estimate, estimates, overlapped
from jaxpipe.planning.hardware import (
    ITEMSIZE,
    Hardware,
    LayerSeconds,
    OpSeconds,
    analytic,
    own_costs,
    read_own,
    write_own,
)
from jaxpipe.planning.memory import RankBytes, layout_of, rank_bytes
from jaxpipe.planning.table import Plan

__all__ = [
    "ITEMSIZE",
    "Advice",
    "Candidate",
    "Choice",
    "Estimate",
    "Hardware",
    "LayerSeconds",
    "OpSeconds",
    "Plan",
    "RankBytes",
    "advise",
    "analytic",
    "candidate",
    "chosen",
    "configured",
    "costs_of",
    "decided",
    "estimate",
    "estimates",
    "layers_of",
    "layout_of",
    "lockstep_of",
    "op_seconds",
    "overlapped",
    "own_costs",
    "rank_bytes",
    "read_own",
    "sizes_of",
    "write_own",
]
