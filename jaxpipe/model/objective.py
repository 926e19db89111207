"""Losses of the targets' log-probabilities, in place of the head's cross-entropy.

A loss function is pure: `loss(logprobs, rows) -> (total, count)` or `(total, count, metrics)`.

- `logprobs` `[B, L]`: natural logarithm of each target's probability, float32 or wider, 0 where
  `rows["targets"]` is -100.
- `rows`: the arrays `[B, L]` of the microbatch, `inputs`, `targets` and what else the batch has; B
  is `train.microbatch_size`.
- `total`: the loss summed over its terms, a scalar. A step trains on the sum over all microbatches
  and replicas, divided by the sum of their counts.
- `count`: the number of these terms, a scalar that depends on `rows` alone.
- `metrics`: further sums by name, which are logged divided by the same count, and have no gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.contract import StageFunctions
from jaxpipe.jax_internals import used_inputs

Tree = Any
Rows = Mapping[str, jax.Array]
LossFunction = Callable[[jax.Array, Rows], tuple[Any, ...]]
LogProbs = Callable[[Tree, jax.Array, Tree], jax.Array]  # (embed_head, x, rows) -> [B, L]
LOSS = "loss"  # name of the first loss


class _Made(NamedTuple):
    """The results of a loss function."""

    total: jax.Array
    count: jax.Array
    metrics: Mapping[str, jax.Array] = {}


@dataclass(frozen=True)
class Objective:
    """A loss function and the rows that it reads.

    Attributes:
      function: the loss.
      rows: names of the float32 arrays `[B, L]` that it reads besides `inputs` and `targets`.
      metrics: names of its metrics.
    """

    function: LossFunction
    rows: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    @classmethod
    def trace(
        cls, function: LossFunction, rows: tuple[str, ...], shape: tuple[int, int]
    ) -> "Objective":
        """The objective of a loss function, called once with arrays of shape `[B, L]`.

        Raises `ValueError` where it returns anything else than a loss function does.
        """
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        floats = jax.ShapeDtypeStruct(shape, jnp.float32)
        given = {"inputs": ids, "targets": ids} | dict.fromkeys(rows, floats)

        def call(logprobs: jax.Array, rows: Rows) -> _Made:
            return _Made(*_as_tuple(function(logprobs, rows)))

        made = jax.eval_shape(call, floats, given)
        for name, value in {"total": made.total, "count": made.count, **made.metrics}.items():
            if getattr(value, "shape", None) != ():
                raise ValueError(
                    f"its {name} is {value}: sum it over the microbatch, to one number"
                )
        closed = jax.make_jaxpr(lambda logprobs, rows: call(logprobs, rows).count)(floats, given)
        if used_inputs(closed, [True])[0]:
            raise ValueError(
                "its count depends on the log-probabilities: count terms by the rows alone"
            )
        return cls(function, rows, tuple(made.metrics))

    def applied(self, functions: StageFunctions, logprobs: LogProbs) -> StageFunctions:
        """The model's functions with this loss in place of the head's.

        Auxiliary losses of layers stay means over tokens.
        """

        def head(embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
            return self.sums(logprobs(embed_head, x, rows), rows)

        return replace(
            functions,
            head=head,
            count=self.count,
            tokens=functions.tokens or functions.count,
            losses=(LOSS, *self.metrics),
            batch_keys=(*functions.batch_keys, *self.rows),
        )

    def sums(self, logprobs_BL: jax.Array, rows: Rows) -> jax.Array:
        """The loss of a microbatch, or with metrics an array of it and them.

        Raises `ValueError` where the batch lacks a row.
        """
        if missing := [name for name in self.rows if name not in rows]:
            raise ValueError(
                f"the loss reads the row {missing[0]!r}, but the batch has only "
                f"{', '.join(rows)}: add it, float32 of the shape of `targets`."
            )
        made = _Made(*_as_tuple(self.function(logprobs_BL, rows)))
        if not self.metrics:
            return made.total
        metrics = [jax.lax.stop_gradient(made.metrics[name]) for name in self.metrics]
        dtype = jnp.promote_types(made.total.dtype, jnp.float32)
        return jnp.stack([jnp.asarray(value, dtype) for value in (made.total, *metrics)])

    def count(self, rows: Rows) -> jax.Array:
        """Number of the loss's terms in a microbatch."""
        zeros = jnp.zeros(rows["targets"].shape, jnp.float32)
        return jnp.asarray(_Made(*_as_tuple(self.function(zeros, rows))).count)


def _as_tuple(made: Any) -> tuple[Any, ...]:
    """What a loss function returned; raises `ValueError` unless it is a tuple of two or three."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"it returns a {type(made).__name__}: return (total, count) or (total, count, metrics)"
        )
    return made
