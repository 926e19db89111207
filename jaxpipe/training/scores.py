"""Scores of a batch's targets by the forward-only pass, on the mesh of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np
from msgspec import structs

from jaxpipe.model.loss import TokenScores
from jaxpipe.pipeline import Pipeline
from jaxpipe.planning.model import model_of
from jaxpipe.training.trainer import Trainer

Tree = Any


@dataclass(frozen=True)
class BatchScores:
    """Scores the targets of batches, with one compiled program for every length of rows.

    Attributes:
      trainer: of the run.
      pipeline: the model, with token scores as its outputs (`StageFunctions.outputs`).
    """

    trainer: Trainer
    pipeline: Pipeline

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """The scores of a run's model, whatever loss the run trains on."""
        config = trainer.config
        train = structs.replace(config.train, loss="cross_entropy", loss_rows=())
        model = model_of(structs.replace(config, train=train), trainer.grouped)
        functions = replace(model.functions, outputs=model.token_scores)
        return cls(trainer, replace(trainer.pipeline, functions=functions))

    def __call__(
        self, params: Tree, batch: Mapping[str, np.ndarray], variables: Tree = None
    ) -> TokenScores:
        """Score a host batch of arrays `[M, B, L]`: host arrays of this shape, in its order.

        Args:
          params: stage-stacked, as in `State.params`.
          batch: `inputs`, `targets` and what else the model's layers read.
          variables: the model's variables.
        """
        shape, sharder = batch["inputs"].shape, self.trainer.sharder
        made = self._program(params, self.trainer.put(dict(batch)), variables)
        return jax.tree.map(lambda values: sharder.restore(np.asarray(values), shape), made)

    @cached_property
    def _program(self) -> Any:
        def outputs(params: Tree, batch: Tree, variables: Tree) -> Tree:
            return self.pipeline.forward(params, batch, variables).outputs

        return jax.jit(outputs, compiler_options=self.trainer.compiler_options)
