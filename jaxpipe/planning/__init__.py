"""What a run would cost under every schedule, before any device is touched. Nothing needs jax."""

from jaxpipe.planning.advice import Advice, advise
from jaxpipe.planning.candidates import Candidate, candidate, candidates
from jaxpipe.planning.chosen import layers_of, lockstep_of, op_seconds, schedule_of
from jaxpipe.planning.estimate import Estimate, estimate
from jaxpipe.planning.hardware import ITEMSIZE, Hardware, LayerSeconds, OpSeconds, analytic
from jaxpipe.planning.memory import RankBytes, rank_bytes

__all__ = [
    "ITEMSIZE",
    "Advice",
    "Candidate",
    "Estimate",
    "Hardware",
    "LayerSeconds",
    "OpSeconds",
    "RankBytes",
    "advise",
    "analytic",
    "candidate",
    "candidates",
    "estimate",
    "layers_of",
    "lockstep_of",
    "op_seconds",
    "rank_bytes",
    "schedule_of",
]
