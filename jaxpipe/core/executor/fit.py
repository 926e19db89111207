"""Checks that model, schedule, mesh, parameters and batch of a `Pipeline` fit each other."""

import math
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxpipe.core.contract import Tree
from jaxpipe.core.mesh import PP, REPLICA_AXES

if TYPE_CHECKING:
    from jaxpipe.core.executor.executor import Pipeline


def check_fit(pipeline: "Pipeline", params: Tree, batch: Tree) -> None:
    """Raise `ValueError` where stage-stacked params or a batch `[M, B, ...]` cannot be run."""
    schedule, mesh = pipeline.schedule, pipeline.mesh
    if (schedule.slices > 1) != pipeline.traced_functions.has_slices:
        raise ValueError(
            f"{schedule.name} has slices={schedule.slices}: the functions need a state if, and "
            f"only if, there is more than one."
        )
    if schedule.pp != mesh.shape[PP]:
        raise ValueError(
            f"the schedule has {schedule.pp} ranks but the mesh has pp={mesh.shape[PP]}."
        )
    counts, slots = pipeline.layers_per_stage, len(params["layers"])
    stages, chunks = schedule.stages, schedule.placement.stored_chunks
    fits = slots % chunks == 0 if counts is None else len(counts) == stages
    if not fits or len(pipeline.layout(slots).runs) != slots:
        raise ValueError(
            f"layers_per_stage={counts and list(counts)} with {slots} layer slots a rank: "
            f"{schedule.name} has {stages} stages, {chunks} a rank, so it needs {stages} "
            f"counts, and for every chunk as many slots as its longest stage has layers."
        )
    execution, pairs = pipeline.execution, pipeline.tables.pairs
    if execution.unroll_layers is not None and (execution.offload_layers or pairs):
        raise ValueError(
            f"unroll_layers={execution.unroll_layers} with "
            f"offload_layers={execution.offload_layers} and {len(pairs)} pairs of actions: a loop "
            f"over layers is for neither; leave unroll_layers None."
        )
    _check_batch(pipeline, batch)


def _check_batch(pipeline: "Pipeline", batch: Tree) -> None:
    microbatches, reads = pipeline.schedule.microbatches, pipeline.functions.batch_keys
    if reads is not None and (unknown := [name for name in batch if name not in reads]):
        raise ValueError(
            f"the batch has a leaf {unknown[0]!r} that the model does not read: leave it out; "
            f"it reads {', '.join(reads)}."
        )
    dp = math.prod(pipeline.mesh.shape[axis] for axis in REPLICA_AXES)
    for leaf in jax.tree.leaves(batch):
        shape = np.shape(leaf)
        if len(shape) < 2 or shape[0] != microbatches or shape[1] % dp:
            raise ValueError(
                f"a batch leaf has shape {shape}: it needs [M, B, ...] with the "
                f"schedule's M={microbatches} and B a multiple of dp={dp}."
            )
