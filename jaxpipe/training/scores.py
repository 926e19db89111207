"""Scores of a host batch's targets, on the mesh of a trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from msgspec import structs

from jaxpipe.model.loss import TokenScores
from jaxpipe.pipeline import Pipeline
from jaxpipe.planning.model import model_of
from jaxpipe.runtime import position
from jaxpipe.training.trainer import Trainer

Tree = Any


@dataclass(frozen=True)
class BatchScores:
    """Scores the targets of batches, whatever loss the trainer's steps have."""

    trainer: Trainer

    def __call__(
        self, params: Tree, batch: Mapping[str, np.ndarray], variables: Tree = None
    ) -> TokenScores:
        """Score a host batch of arrays `[M, B, L]`: host arrays of this shape, in its order.

        Args:
          params: stage-stacked, as in `State.params`.
          batch: `inputs`, `targets` and what else the model's layers read.
          variables: the model's variables.
        """
        position.enter("score")
        shape, sharder = batch["inputs"].shape, self.trainer.sharder
        outputs = self._program(params, self.trainer.put(dict(batch)), variables)
        return jax.tree.map(lambda values: sharder.restore(np.asarray(values), shape), outputs)

    @cached_property
    def _program(self) -> Any:
        trainer = self.trainer
        train = structs.replace(trainer.config.train, loss="cross_entropy", loss_rows=())
        model = model_of(structs.replace(trainer.config, train=train), trainer.grouped)
        functions = replace(model.functions, outputs=model.token_scores)
        return outputs_program(trainer, replace(trainer.pipeline, functions=functions))


def outputs_program(trainer: Trainer, pipeline: Pipeline) -> Any:
    """Compiled `(params, batch, variables) -> outputs` of a pipeline, all on every device.

    The outputs are those of the forward-only pass, of microbatches in the order of `trainer.put`.
    """

    def outputs(params: Tree, batch: Tree, variables: Tree) -> Tree:
        return pipeline.forward(params, batch, variables).outputs

    return jax.jit(
        outputs,
        out_shardings=NamedSharding(trainer.mesh, PartitionSpec()),
        compiler_options=trainer.compiler_options,
    )
