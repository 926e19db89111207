"""The choice of a next token from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """How a next token is drawn.

    Attributes:
      temperature: divides the logits; 0: the most likely token (greedy).
      top_p: only the most likely tokens whose probabilities add up to at least this are drawn
        (nucleus sampling, Holtzman et al. 2020); 1: all are.
      seed: of the draws.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    >>> Sampling().draw(logits, jnp.int32(0)).tolist()
    [0]
    >>> jnp.isfinite(Sampling(1.0, top_p=0.7).allowed(logits)).tolist()
    [[True, True, False, False]]
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def draw(self, logits_BV: jax.Array, position: jax.Array) -> jax.Array:
        """Draw one token per row, int32 `[B]`; the draw depends on seed, position and row."""
        logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
        if not self.temperature:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        key = jax.random.fold_in(jax.random.key(self.seed), position)
        return jax.random.categorical(key, self.allowed(logits_BV)).astype(jnp.int32)

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


GREEDY = Sampling()
