"""A layer that runs on two halves of a microbatch's rows.

A layer's forward is one chain: nothing is left to compute beside one of its collectives. Two halves
of the rows are two chains, and while one waits for a collective the other computes (Wang et al.
2024, "Domino", arXiv 2409.15241). `jaxpipe.core.split.phases` puts their equations in that order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from jaxpipe.core.contract import Aux, Context, LayerKind, LayerOutput, Tree
from jaxpipe.core.contract.layer import POINT
from jaxpipe.core.split.jaxpr import sum_of_two

_HALF = POINT + "half "  # followed by 0 or 1: the name of a half's x and y, and of their gradients


def in_halves(kind: LayerKind) -> LayerKind:
    """Return the kind whose layer runs the given one on the first and on the second half of rows.

    Results are those of the kind where a layer treats every row alone. What it computes for all
    rows of a call together differs as it does between two microbatches: which tokens exceed a
    capacity of the experts, and fp8 scales of the current values. Residuals are those of both
    halves. The result pairs with no gradient (`LayerKind.pair`), whose order would be another.
    """

    def layer(params: Tree, x: jax.Array, context: Context) -> LayerOutput:
        weights = _apply(_twice, (params, context.embed_head))
        observed = _apply(_observed_twice, {n: context.variables[n] for n in kind.statistics})
        rows, states = _apply(_halves, context.rows), context.state or (None, None)
        outputs = []
        for half, x_of_half in enumerate(_halves(x)):
            own, embed_head = weights[half]
            variables = context.variables
            if kind.statistics:
                variables = {**variables, **observed[half]}
            seen = Context(rows[half], context.index, states[half], variables, embed_head)
            output = kind.layer(own, _named(x_of_half, half), seen)
            outputs.append(output._replace(y=_named(output.y, half)))
        first, second = outputs
        y = lax.concatenate([first.y, second.y], 0)
        state = None if kind.state is None else (first.state, second.state)
        return LayerOutput(y, state, _joined(first.aux, second.aux))

    def state(x: jax.Array, rows: Tree) -> tuple[Tree, Tree]:
        assert kind.state is not None
        first, second = (kind.state(*of_half) for of_half in _apply(_halves, (x, rows)))
        return first, second

    return replace(kind, layer=layer, state=kind.state and state, pair=None)


def half_named(eqn: JaxprEqn) -> int | None:
    """The half of whose values an equation names one, 0 or 1; None: it names none."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith(_HALF):
        return None
    return int(eqn.params["name"].removeprefix(_HALF))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _named(x: jax.Array, half: int) -> jax.Array:
    """Return x of a half with its name, which its gradient has too."""
    return checkpoint_name(x, f"{_HALF}{half}")


_named.defvjp(lambda x, half: (_named(x, half), None), lambda half, _, dx: (_named(dx, half),))


def _halves(rows: jax.Array) -> Sequence[jax.Array]:
    if rows.shape[0] % 2:
        raise ValueError(
            f"a layer in halves gets an array of shape {list(rows.shape)}: give it an even number "
            f"of rows."
        )
    return lax.split(rows, (rows.shape[0] // 2,) * 2)


def _apply(of_leaf: Callable[[jax.Array], Sequence[jax.Array]], tree: Tree) -> tuple[Tree, Tree]:
    """Return the trees of the first and of the second results of a function of every leaf."""
    leaves, form = jax.tree.flatten(tree)
    both = [of_leaf(leaf) for leaf in leaves]
    first, second = ([one[half] for one in both] for half in range(2))
    return jax.tree.unflatten(form, first), jax.tree.unflatten(form, second)


@jax.custom_vjp
def _twice(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight for both halves, whose gradients become one matmul where they are matmuls."""
    return weight, weight


_twice.defvjp(lambda weight: ((weight, weight), None), lambda _, both: (sum_of_two(*both),))


@jax.custom_vjp
def _observed_twice(statistic: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The statistics variable for both halves; its cotangent is the elementwise maximum."""
    return statistic, statistic


_observed_twice.defvjp(lambda of: ((of, of), None), lambda _, both: (jnp.maximum(*both),))


def _joined(first: Aux, second: Aux) -> Aux:
    """The auxiliary outputs of all rows."""

    def by_name(of: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {name: of(value, other[name]) for name, value in one.items()}

    def add(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        return one[0] + other[0], one[1] + other[1]

    return Aux(
        by_name(add, first.losses, second.losses),
        by_name(jnp.add, first.sums, second.sums),
        by_name(jnp.maximum, first.maxima, second.maxima),
        by_name(lambda *both: jnp.concatenate(both), first.per_example, second.per_example),
    )
