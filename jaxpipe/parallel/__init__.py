"""The device mesh, what is stored where on it, and what devices do together."""

from jaxpipe.parallel.experts import ExpertParallel
from jaxpipe.parallel.layout import StageLayout, is_stage_form
from jaxpipe.parallel.mesh import DP, EP, PP, REPLICAS, RP, SHARDS, TP, Factors, make_mesh
from jaxpipe.parallel.sequence import ContextParallel, deal_batch
from jaxpipe.parallel.sharding import Sharding, Stored, batch_spec
from jaxpipe.parallel.tensor import TensorParallel, VocabularyParallel

__all__ = [
    "DP",
    "EP",
    "PP",
    "REPLICAS",
    "RP",
    "SHARDS",
    "TP",
    "ContextParallel",
    "ExpertParallel",
    "Factors",
    "Sharding",
    "StageLayout",
    "Stored",
    "TensorParallel",
    "VocabularyParallel",
    "batch_spec",
    "deal_batch",
    "is_stage_form",
    "make_mesh",
]
