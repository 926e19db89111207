"""Next tokens without a cache: a forward-only pass of the pipeline over all tokens so far.

Every new token costs a pass over its whole sequence, in return for any mesh that keeps sequences
whole and for several processes.

Shapes: N prompts, S tokens of the longest sequence, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.sampling import Sampling
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.moe.balance import REAL
from jaxpipe.runtime import position
from jaxpipe.training.scores import outputs_program

Tree = Any


@dataclass(frozen=True, eq=False)
class UncachedModel:
    """The programs of a model on the mesh of its pipeline, one for every padded length.

    Attributes:
      loaded: the model on its mesh.
      sampling: how tokens are drawn.
    """

    loaded: LoadedModel
    sampling: Sampling

    def read(self, tokens_NS: np.ndarray, count: int) -> int:
        """Return from which token on `next` is to be called: nothing is kept of those before."""
        return count

    def next(self, tokens_NS: np.ndarray, place: int) -> np.ndarray:
        """Draw the token after `place` of every row, integers `[N]`."""
        size = self.loaded.trainer.samples_per_step
        parts = [
            self._logits(tokens_NS[begin : begin + size, : place + 1])
            for begin in range(0, len(tokens_NS), size)
        ]
        return np.asarray(self._draw(np.concatenate(parts), np.int32(place)))

    def _logits(self, tokens_NL: np.ndarray) -> np.ndarray:
        """Logits `[N, V]` after the last token of every row."""
        position.enter("score")
        trainer, (rows, length) = self.loaded.trainer, tokens_NL.shape
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
        made = self._program(self.loaded.params, trainer.put(batch), self.loaded.variables)
        return np.asarray(made).reshape(-1, made.shape[-1])[:rows]

    @cached_property
    def _program(self) -> Any:
        """Compiled `(params, batch, variables) -> logits [M, B, V]`, on every device."""
        model = self.loaded.trainer.model
        return outputs_program(self.loaded.trainer, self.loaded.pipeline(model.next_logits))

    @cached_property
    def _draw(self) -> Any:
        return jax.jit(self.sampling.draw)
