"""Forward-only passes over a host batch, on the mesh of a trainer: scores, and experts' choices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.model.lora import with_fields
from jaxpipe.model.loss import TokenScores
from jaxpipe.pipeline import Pipeline
from jaxpipe.pipeline.reference import StepOutput
from jaxpipe.runtime import position
from jaxpipe.training.trainer import Trainer

Tree = Any
Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchScores:
    """Scores the targets of batches, whatever loss the trainer's steps have.

    Experts drop what a step on the same batch drops, so that the scores of the parameters of a step
    are those of its loss. `Trainer.evaluation` has the same model without drops.

    A batch has arrays `[M, B, L]`: `inputs`, `targets` and what else the model's layers read. Rows
    of the loss are ignored. Parameters are stage-stacked, as in `State.params`.
    """

    trainer: Trainer

    def __call__(self, params: Tree, batch: Batch, variables: Tree = None) -> TokenScores:
        """Score a host batch: host arrays of its shape, in its order."""
        return self._run(self._scoring, params, batch, variables)

    def record_routes(
        self, params: Tree, batch: Batch, variables: Tree = None
    ) -> dict[str, np.ndarray]:
        """The host batch with the choice of experts, which scores and steps of it then replay.

        `routes [M, B, L, sparse layers, experts_per_token]` is added, unless there are no experts.
        """
        return {**batch, **self._run(self._recording, params, batch, variables)}

    def _run(self, program: Any, params: Tree, batch: Batch, variables: Tree) -> Tree:
        position.enter("score")
        shape, sharder = batch["inputs"].shape, self.trainer.sharder
        unread = self.trainer.config.loss_rows
        rows = {name: leaf for name, leaf in batch.items() if name not in unread}
        outputs = program(params, self.trainer.put(rows), variables)
        return jax.tree.map(lambda values: sharder.restore(np.asarray(values), shape), outputs)

    @cached_property
    def _scoring(self) -> Any:
        model = with_fields(self.trainer.model, objective=None)
        functions = replace(model.functions, outputs=model.token_scores)
        return outputs_program(self.trainer, replace(self.trainer.pipeline, functions=functions))

    @cached_property
    def _recording(self) -> Any:
        model = with_fields(self.trainer.model, objective=None, recorded=True)
        pipeline = replace(self.trainer.pipeline, functions=model.functions)
        return outputs_program(self.trainer, pipeline, attrgetter("aux.per_example"))


def outputs_program(
    trainer: Trainer,
    pipeline: Pipeline,
    read: Callable[[StepOutput], Tree] = attrgetter("outputs"),
) -> Any:
    """Compiled `(params, batch, variables) -> outputs` of a pipeline, all on every device.

    The outputs are what `read` takes of the forward-only pass, of microbatches in the order of
    `trainer.put`.
    """

    def outputs(params: Tree, batch: Tree, variables: Tree) -> Tree:
        return read(pipeline.forward(params, batch, variables))

    return jax.jit(
        outputs,
        out_shardings=NamedSharding(trainer.mesh, PartitionSpec()),
        compiler_options=trainer.compiler_options,
    )
