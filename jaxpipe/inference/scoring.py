"""Scores of given tokens by the forward-only pass, on any mesh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import IGNORE
from jaxpipe.training.scores import BatchScores


class SequenceScores(NamedTuple):
    """Scores of the tokens 1 .. n - 1 of a sequence of n, each after all tokens before it.

    Attributes:
      logprobs: natural logarithms of probabilities, float32 `[n - 1]`.
      greedy: whether no other token was more likely, bool `[n - 1]`.
    """

    logprobs: np.ndarray
    greedy: np.ndarray


@dataclass(frozen=True)
class Scorer:
    """Scores sequences with one compiled program for every padded length.

    Attributes:
      loaded: the model on its mesh.
    """

    loaded: LoadedModel

    def score(self, sequences: Sequence[np.ndarray]) -> list[SequenceScores]:
        """Score sequences of integer token ids `[n]`, of differing lengths n >= 1, in their order.

        Sequences of similar length share a batch.
        """
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        scores = (
            score
            for batch in self._batches([sequences[i] for i in order])
            for score in self._score_batch(batch)
        )
        by_number = dict(zip(order, scores))
        return [by_number[i] for i in range(len(sequences))]

    def _batches(self, sequences: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
        size = self.loaded.trainer.samples_per_step
        for begin in range(0, len(sequences), size):
            yield sequences[begin : begin + size]

    def _score_batch(self, sequences: Sequence[np.ndarray]) -> list[SequenceScores]:
        trainer, lengths = self.loaded.trainer, [len(tokens) - 1 for tokens in sequences]
        shape = *trainer.config.batch_shape.values(), trainer.config.length_of(max(*lengths, 1))
        batch = {
            "inputs": np.zeros(shape, np.int32),
            "targets": np.full(shape, IGNORE, np.int32),
            REAL: np.zeros(shape, np.int32),
        }
        flat = {name: leaf.reshape(-1, shape[-1]) for name, leaf in batch.items()}
        for row, (tokens, length) in enumerate(zip(sequences, lengths)):
            flat["inputs"][row, :length] = tokens[:-1]
            flat["targets"][row, :length] = tokens[1:]
            flat[REAL][row, :length] = 1
        scores = self._scores(self.loaded.params, batch, self.loaded.variables)
        logprobs, greedy = (np.asarray(array).reshape(-1, shape[-1]) for array in scores[:2])
        return [
            SequenceScores(logprobs[row, :length].astype(np.float32), greedy[row, :length] > 0)
            for row, length in enumerate(lengths)
        ]

    @cached_property
    def _scores(self) -> BatchScores:
        return BatchScores(self.loaded.trainer)
