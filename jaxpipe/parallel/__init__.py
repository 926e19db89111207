"""The device mesh and what is stored where on it."""

from jaxpipe.parallel.layout import StageLayout, batch_spec, shared_axis, state_specs
from jaxpipe.parallel.mesh import DP, PP, TP, make_mesh

__all__ = [
    "DP",
    "PP",
    "TP",
    "StageLayout",
    "batch_spec",
    "make_mesh",
    "shared_axis",
    "state_specs",
]
