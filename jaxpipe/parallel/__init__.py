"""The device mesh, the sharding of every array on it, and the collectives inside layers."""

from jaxpipe.parallel.experts import ExpertParallel
from jaxpipe.parallel.layout import (
    StageLayout,
    is_stage_stacked,
    map_stage_stacked,
    stage_stacked_trees,
)
from jaxpipe.parallel.mesh import (
    DP,
    EP,
    PP,
    REPLICA_AXES,
    RP,
    TP,
    ZERO_AXES,
    ReplicaFactors,
    make_mesh,
)
from jaxpipe.parallel.sequence import ContextParallel, shard_batch
from jaxpipe.parallel.sharding import ParamSharding, Sharding, batch_spec
from jaxpipe.parallel.tensor import TensorParallel, VocabularyParallel

__all__ = [
    "DP",
    "EP",
    "PP",
    "REPLICA_AXES",
    "RP",
    "TP",
    "ZERO_AXES",
    "ContextParallel",
    "ExpertParallel",
    "ParamSharding",
    "ReplicaFactors",
    "Sharding",
    "StageLayout",
    "TensorParallel",
    "VocabularyParallel",
    "batch_spec",
    "is_stage_stacked",
    "make_mesh",
    "map_stage_stacked",
    "shard_batch",
    "stage_stacked_trees",
]
