"""The choice of a next token from logits."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.training.argument_checks import check_seed, check_temperature


class Draw(NamedTuple):
    """A next token of every row, and its log-probability."""

    token_B: jax.Array
    logprob_B: jax.Array


@dataclass(frozen=True)
class Sampling:
    """How a next token is drawn.

    Attributes:
      temperature: divides the logits; 0: the most likely token (greedy).
      top_p: only the most likely tokens whose probabilities add up to at least this are drawn
        (nucleus sampling, Holtzman et al. 2020); 1: all are.

    Raises `ConfigError` where a value is none of these.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    >>> greedy = Sampling().draw(logits, key_of(0), jnp.int32(0))
    >>> greedy.token_B.tolist(), jnp.exp(greedy.logprob_B).round(6).tolist()
    ([0], [0.5])
    >>> jnp.isfinite(Sampling(1.0, top_p=0.7).allowed(logits)).tolist()
    [[True, True, False, False]]
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature, zero=True)
        if not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p={self.top_p!r}: give a share above 0 and at most 1.")

    def draw(self, logits_BV: jax.Array, key: jax.Array, position: jax.Array) -> Draw:
        """Draw one token per row, int32; the draw depends on `key` (`key_of`), position and row.

        Log-probabilities are those of softmax(logits / temperature), of softmax(logits) at
        temperature 0, before `top_p` leaves tokens out.
        """
        logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
        if self.temperature:
            here = jax.random.fold_in(jax.random.wrap_key_data(key), position)
            token_B = jax.random.categorical(here, self.allowed(logits_BV))
            logits_BV = logits_BV / self.temperature
        else:
            token_B = jnp.argmax(logits_BV, axis=-1)
        logprobs_BV = jax.nn.log_softmax(logits_BV)
        logprob_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]
        return Draw(token_B.astype(jnp.int32), logprob_B)

    def allowed(self, logits_BV: jax.Array) -> jax.Array:
        """Logits divided by the temperature, minus infinity outside the nucleus."""
        logits_BV = logits_BV / self.temperature
        if self.top_p == 1:
            return logits_BV
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        sorted_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV), order_BV, axis=-1)
        before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
        rank_BV = jnp.argsort(order_BV, axis=-1)
        inside_BV = jnp.take_along_axis(before_BV < self.top_p, rank_BV, axis=-1)
        return jnp.where(inside_BV, logits_BV, -jnp.inf)


def key_of(seed: int) -> np.ndarray:
    """The key of a seed, in a form that all processes of a program can pass to it."""
    check_seed(seed)
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


GREEDY = Sampling()
