"""Forward-only passes over a host batch, on the mesh of a trainer: scores, and experts' choices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.config import ConfigError
from jaxpipe.core.executor import Pipeline
from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.model.loss import CHOICES, ScoreOptions, TokenScores
from jaxpipe.runtime import position
from jaxpipe.training.argument_checks import check_temperature, is_integer
from jaxpipe.training.batch_checks import check_mapping
from jaxpipe.training.state_checks import check_parameters
from jaxpipe.training.trainer import Trainer

Tree = Any
Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchScores:
    """Scores the targets of batches, whatever loss the trainer's steps have.

    Experts drop what a step on the same batch drops, so that the scores of the parameters of a step
    are those of its loss. `Trainer.evaluation` has the same model without drops.

    A batch has arrays `[M, B, L]`: `inputs`, `targets` and what else the model's layers read. Rows
    of the loss are ignored, but for `choices [M, B, L, K]`, tokens whose log-probabilities are
    returned, too. Parameters are stage-stacked, as in `State.params`. Dropout drops nothing.

    Attributes:
      trainer: of the model.
      temperature: T of the distribution softmax(logits / T), of which all scores are; None:
        `train.loss_temperature`, as for the loss.
      entropy: whether to return entropies.
      top: number of most likely tokens to return at each position; 0: none.

    Raises `ConfigError` where a value is none of these.
    """

    trainer: Trainer
    temperature: float | None = None
    entropy: bool = False
    top: int = 0

    def __post_init__(self) -> None:
        size = self.trainer.config.model.vocab_size
        if not (is_integer(self.top) and 0 <= self.top <= size):
            raise ConfigError(f"top={self.top!r}: give 0 to model.vocab_size={size} tokens.")
        check_temperature(self._options.temperature)

    def __call__(self, params: Tree, batch: Batch, variables: Tree = None) -> TokenScores:
        """Score a host batch: host arrays of its shape, in its order."""
        return self._run(self._scoring, params, batch, variables, (CHOICES,))

    def record_routes(
        self, params: Tree, batch: Batch, variables: Tree = None
    ) -> dict[str, np.ndarray]:
        """The host batch with the choice of experts, which scores and steps of it then replay.

        `routes [M, B, L, sparse layers, experts_per_token]` is added, unless there are no experts.
        """
        return {**batch, **self._run(self._recording, params, batch, variables)}

    @property
    def _options(self) -> ScoreOptions:
        default = self.trainer.config.train.loss_temperature
        temperature = default if self.temperature is None else self.temperature
        return ScoreOptions(temperature, self.entropy, self.top)

    def _run(
        self, program: Any, params: Tree, batch: Batch, variables: Tree, also: tuple[str, ...] = ()
    ) -> Tree:
        """Run a program on a batch without the rows of the loss, but for those of `also`."""
        position.enter("score")
        sharder = self.trainer.sharder
        unread = {CHOICES, *self.trainer.config.loss_rows}.difference(also)
        check_mapping(batch)
        rows = {name: leaf for name, leaf in batch.items() if name not in unread}
        if sharder.keys is not None:
            sharder = replace(sharder, keys=(*sharder.keys, *also))
        check_parameters(params, variables, self.trainer.state_shapes)
        placed, shape = sharder.put(rows), np.shape(rows["inputs"])
        sharder.check_placed(placed, trains=False)
        outputs = program(params, placed, variables)
        return jax.tree.map(lambda values: sharder.restore(np.asarray(values), shape), outputs)

    @cached_property
    def _scoring(self) -> Any:
        model = self.trainer.model.with_options(loss={"objective": None})
        outputs = partial(model.token_scores, options=self._options)
        keys = model.functions.batch_keys
        assert keys is not None  # a decoder names what it reads
        functions = replace(model.functions, outputs=outputs, batch_keys=(*keys, CHOICES))
        return outputs_program(self.trainer, replace(self.trainer.pipeline, functions=functions))

    @cached_property
    def _recording(self) -> Any:
        loss, ops = {"objective": None}, {"records_routes": True}
        model = self.trainer.model.with_options(loss=loss, ops=ops)
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
