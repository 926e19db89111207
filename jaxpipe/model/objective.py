"""Losses of the targets' log-probabilities, in place of the head's cross-entropy.

A loss function is pure: `loss(logprobs, rows) -> (total, count)` or `(total, count, metrics)`.

- `logprobs` `[B, L]`: natural logarithm of each target's probability in softmax(logits / T), T
  being `train.loss_temperature`, float32 or wider, 0 where `rows["targets"]` is -100.
- `rows`: the arrays of the microbatch, `inputs`, `targets` and what else the batch has; B is
  `train.microbatch_size`.
- `total`: the loss summed over its terms, a scalar. A step trains on the sum over all microbatches
  and replicas, divided by the sum of their counts.
- `count`: the number of these terms, a scalar that depends on `rows` alone.
- `metrics`: further sums by name, which are logged divided by the same count, and have no gradient.

It gets more of the same distribution where it has arguments of these names:

- `entropy` `[B, L]`: the entropy in nats.
- `choice_logprobs` `[B, L, K]`: the log-probabilities of the tokens `rows["choices"]`, a row
  `choices[K]` of `train.loss_rows`, such as the most likely tokens of a teacher.

Both are 0 where `targets` is -100.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import StageFunctions
from jaxpipe.core.jax_internals import used_inputs
from jaxpipe.model.loss import CHOICES, ScoreOptions, TokenScores

Tree = Any
Rows = Mapping[str, jax.Array]
LossFunction = Callable[..., tuple[Any, ...]]
Scores = Callable[..., TokenScores]  # (embed_head, x, rows, options), as `CausalDecoder`'s
LOSS = "loss"  # name of the first loss
# Further arguments of a loss function, and the fields of `TokenScores` that they are.
_ARGUMENTS = {"entropy": "entropy_BL", "choice_logprobs": "choice_logprobs_BLK"}


class _Made(NamedTuple):
    """The results of a loss function."""

    total: jax.Array
    count: jax.Array
    metrics: Mapping[str, jax.Array] = {}


@dataclass(frozen=True)
class Objective:
    """A loss function and what it reads.

    Attributes:
      function: the loss.
      rows: names of the arrays that it reads besides `inputs` and `targets`.
      metrics: names of its metrics.
      arguments: its arguments besides `logprobs` and `rows`.
      temperature: divides the logits of which the log-probabilities are.
    """

    function: LossFunction
    rows: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    temperature: float = 1.0

    @classmethod
    def trace(
        cls,
        function: LossFunction,
        rows: Mapping[str, tuple[int, ...]],
        shape: tuple[int, int],
        temperature: float = 1.0,
    ) -> "Objective":
        """The objective of a loss function, called once with arrays of shape `[B, L]`.

        `rows` are the dims after `[B, L]` of the arrays that it reads, by name. Raises `ValueError`
        where it returns anything else than a loss function does, or wants other arguments.
        """
        objective = cls(function, tuple(rows), (), _arguments_of(function, rows), temperature)
        dtypes = {name: jnp.int32 if name == CHOICES else jnp.float32 for name in rows}
        given = {name: jax.ShapeDtypeStruct((*shape, *rows[name]), dtypes[name]) for name in rows}
        given |= dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape, jnp.int32))
        scores = jax.eval_shape(objective._no_scores, given)
        made = jax.eval_shape(objective._made, scores, given)
        for name, value in {"total": made.total, "count": made.count, **made.metrics}.items():
            if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.number):
                raise ValueError(
                    f"its {name} is {value}: sum it over the microbatch, to one number"
                )
        if not jnp.issubdtype(made.total.dtype, jnp.floating):
            raise ValueError(f"its total is {made.total}, which has no gradient: return a float")
        closed = jax.make_jaxpr(lambda *of: objective._made(*of).count)(scores, given)
        if any(used_inputs(closed, [True])[: len(jax.tree.leaves(scores))]):
            raise ValueError(
                "its count depends on the log-probabilities: count terms by the rows alone"
            )
        return replace(objective, metrics=tuple(made.metrics))

    def applied(self, functions: StageFunctions, scores: Scores) -> StageFunctions:
        """The model's functions with this loss in place of the head's."""
        options = ScoreOptions(self.temperature, entropy="entropy" in self.arguments)

        def head(embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
            return self.sums(scores(embed_head, x, rows, options), rows)

        return replace(
            functions,
            head=head,
            count=self.count,
            losses=(LOSS, *self.metrics),
            batch_keys=(*functions.batch_keys, *self.rows),
        )

    def sums(self, scores: TokenScores, rows: Rows) -> jax.Array:
        """The loss of a microbatch, or with metrics an array of it and them.

        Raises `ValueError` where the batch lacks a row.
        """
        if missing := [name for name in self.rows if name not in rows]:
            raise ValueError(
                f"the loss reads the row {missing[0]!r}, but the batch has only "
                f"{', '.join(rows)}: add it, as train.loss_rows declares it."
            )
        made = self._made(scores, rows)
        if not self.metrics:
            return jnp.asarray(made.total)
        metrics = [jax.lax.stop_gradient(made.metrics[name]) for name in self.metrics]
        dtype = jnp.promote_types(made.total.dtype, jnp.float32)
        return jnp.stack([jnp.asarray(value, dtype) for value in (made.total, *metrics)])

    def count(self, rows: Rows) -> jax.Array:
        """Number of the loss's terms in a microbatch."""
        return jnp.asarray(self._made(self._no_scores(rows), rows).count)

    def _made(self, scores: TokenScores, rows: Rows) -> _Made:
        more = {name: getattr(scores, _ARGUMENTS[name]) for name in self.arguments}
        return _Made(*_as_tuple(self.function(scores.logprobs_BL, dict(rows), **more)))

    def _no_scores(self, rows: Rows) -> TokenScores:
        """Zeros in place of scores, of which counts do not depend."""
        zeros_BL = jnp.zeros(rows["targets"].shape, jnp.float32)
        zeros_BLK = jnp.zeros(rows[CHOICES].shape, jnp.float32) if CHOICES in rows else None
        return TokenScores(zeros_BL, zeros_BL.astype(jnp.int32), zeros_BL, zeros_BLK)


def _arguments_of(function: LossFunction, rows: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a loss function's arguments besides the first two.

    Raises `ValueError` for a name that is none, and for choices that no row has.
    """
    takes = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = list(inspect.signature(function).parameters.values())[2:]
    names = tuple(one.name for one in parameters if one.kind in takes and one.name in _ARGUMENTS)
    for one in parameters:
        if one.kind in takes and one.name not in names and one.default is one.empty:
            raise ValueError(
                f"it has an argument {one.name!r}: after (logprobs, rows) come only those of "
                f"{', '.join(_ARGUMENTS)}"
            )
    if "choice_logprobs" in names and CHOICES not in rows:
        raise ValueError("it reads choice_logprobs: add 'choices[K]' to train.loss_rows")
    return names


def _as_tuple(made: Any) -> tuple[Any, ...]:
    """What a loss function returned; raises `ValueError` unless it is a tuple of two or three."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"it returns a {type(made).__name__}: return (total, count) or (total, count, metrics)"
        )
    if not isinstance(made[-1], Mapping) and len(made) == 3:
        raise ValueError(f"its metrics are a {type(made[-1]).__name__}: return a dict of sums")
    return made
