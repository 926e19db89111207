"""Samples of `seq_len + 1` tokens, read by index.

The first L tokens of a sample are the inputs of a model and the last L its targets. N samples,
L tokens (seq_len).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.tokens import Tokens


class Samples(Protocol):
    """Random access to N samples; an array `[N, L + 1]` is one."""

    def __len__(self) -> int:
        """Number of samples N."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """The samples at `indices`, integers `[...]` in 0..N-1, as integers `[..., L + 1]`."""


def cut_samples(tokens: Tokens, seq_len: int) -> np.ndarray:
    """View `[N, L + 1]` of the tokens: the last of a sample is the first of the next.

    Raises `ConfigError` where there are too few tokens for one sample.

    >>> cut_samples(Tokens(np.arange(8), "", "an example"), 3)
    array([[0, 1, 2, 3],
           [3, 4, 5, 6]])
    """
    if len(tokens) <= seq_len:
        raise ConfigError(
            f"a sample is train.seq_len + 1 = {seq_len + 1} tokens, but {tokens.place} has "
            f"{len(tokens)}: use more data, a smaller train.seq_len or another "
            f"data.heldout_fraction."
        )
    return np.lib.stride_tricks.sliding_window_view(tokens.ids, seq_len + 1)[::seq_len]


@dataclass(frozen=True)
class DummySamples:
    """Samples made up as they are read: sample i is a function of (seed, i) alone.

    Each is a walk over the ids in steps of 1 to 4, all as likely, so one token says what the next
    may be, and the loss of a model falls to ln 4 = 1.386 nats (from four ids on).
    """

    seed: int
    vocab_size: int
    seq_len: int  # L
    numbers: range  # the i of each sample

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        walks = [self._walk(self.numbers[index]) for index in indices.flat]
        return np.stack(walks).reshape(*indices.shape, self.seq_len + 1)

    def _walk(self, number: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, number))
        steps = random.integers(1, 5, self.seq_len + 1)
        return (random.integers(self.vocab_size) + steps.cumsum()) % self.vocab_size
