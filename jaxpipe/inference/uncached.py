"""Next tokens without a cache: a forward-only pass of the pipeline over all tokens so far.

Every new token costs a pass over its whole sequence, in return for any mesh and several processes.

Shapes: N prompts, S tokens of the longest sequence, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpipe.inference.sampling import Sampling
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import IGNORE
from jaxpipe.runtime import position
from jaxpipe.training.scores import outputs_program
from jaxpipe.training.trainer import Trainer

Tree = Any


@dataclass(frozen=True, eq=False)
class UncachedModel:
    """The programs of a model on the mesh of its pipeline, one for every padded length.

    Attributes:
      trainer: of the model.
      sampling: how tokens are drawn.
    """

    trainer: Trainer
    sampling: Sampling

    def logits(self, params: Tree, variables: Tree, tokens_NL: np.ndarray) -> np.ndarray:
        """Logits `[N, V]` after the last token of at most as many rows as a batch has."""
        position.enter("score")
        trainer, (rows, length) = self.trainer, tokens_NL.shape
        shape = *trainer.config.batch_shape.values(), trainer.config.length_of(length)
        batch = {
            "inputs": np.zeros(shape, np.int32),
            "targets": np.full(shape, IGNORE, np.int32),
            REAL: np.zeros(shape, np.int32),
        }
        flat = {name: leaf.reshape(-1, shape[-1]) for name, leaf in batch.items()}
        flat["inputs"][:rows, :length] = tokens_NL
        flat["targets"][:rows, length - 1] = 0  # the place whose logits are returned
        flat[REAL][:rows, :length] = 1
        made = np.asarray(self._program(params, trainer.put(batch), variables))
        # Of a sequence in shards or slices, one has this place.
        number = np.broadcast_to(np.arange(len(flat["inputs"]))[:, None], flat["inputs"].shape)
        shards = trainer.sharder.shard({"at": batch["targets"], "row": number.reshape(shape)})
        has_place = (shards["at"] != IGNORE).any(axis=-1)
        return made[has_place][np.argsort(shards["row"][has_place][:, 0])]

    @cached_property
    def _program(self) -> Any:
        """Compiled `(params, batch, variables) -> logits [M, B, V]`, on every device."""
        trainer = self.trainer
        functions = replace(trainer.model.functions, outputs=trainer.model.next_logits)
        return outputs_program(trainer, replace(trainer.pipeline, functions=functions))

    @cached_property
    def draw(self) -> Any:
        """Compiled `Sampling.draw`."""
        return jax.jit(self.sampling.draw)


@dataclass(frozen=True, eq=False)
class UncachedDecoding:
    """Decoding without a cache.

    Attributes:
      model: its programs.
      params, variables: of the model.
      key: of the draws.
    """

    model: UncachedModel
    params: Tree
    variables: Tree
    key: np.ndarray

    def read(self, tokens_NS: np.ndarray, count: int) -> int:
        """Return from which token on `next` is to be called: nothing is kept of those before."""
        return count

    def next(self, tokens_NS: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the token after `place` of every row: tokens and log-probabilities, `[N]` each."""
        size = self.model.trainer.samples_per_step
        parts = [
            self.model.logits(
                self.params, self.variables, tokens_NS[begin : begin + size, : place + 1]
            )
            for begin in range(0, len(tokens_NS), size)
        ]
        tokens, logprobs = self.model.draw(np.concatenate(parts), self.key, np.int32(place))
        return np.asarray(tokens), np.asarray(logprobs)
