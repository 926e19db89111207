"""The device mesh, the sharding of every array on it, and the collectives inside layers."""

from jaxpipe.core.mesh.experts import ExpertParallel
from jaxpipe.core.mesh.layout import (
    StageLayout,
    is_stage_stacked,
    map_stage_stacked,
    stage_stacked_trees,
)
from jaxpipe.core.mesh.mesh import (
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
from jaxpipe.core.mesh.sequence import ContextParallel, shard_batch
from jaxpipe.core.mesh.sharding import ParamSharding, Sharding, batch_spec
from jaxpipe.core.mesh.tensor import TensorParallel, VocabularyParallel

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
