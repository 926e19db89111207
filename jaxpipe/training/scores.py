"""Scores of a host batch's targets, on the mesh of a trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe.model.loss import TokenScores
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
        made = self.trainer.token_scores(params, self.trainer.put(dict(batch)), variables)
        return jax.tree.map(lambda values: sharder.restore(np.asarray(values), shape), made)
