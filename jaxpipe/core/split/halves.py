"""A model that runs on two halves of a microbatch: of its rows, or of its sequences.

A layer's forward is one chain: nothing is left to compute beside one of its collectives. Two halves
are two chains, and while one waits for a collective the other computes (Wang et al. 2024, "Domino",
arXiv 2409.15241). `jaxpipe.core.split.phases` puts their equations in that order.

Halves of sequences are two sequence slices of one action: the queries of the second read the state
(keys and values, say) that the first returned, and its gradient goes back from the second to the
first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpipe.core.contract import Aux, Context, LayerKind, LayerOutput, StageFunctions, Tree
from jaxpipe.core.contract.layer import POINT
from jaxpipe.core.split.jaxpr import sum_of_two

Halves = Literal["rows", "sequence"]

_AXES = {"rows": 0, "sequence": 1}  # of x and of the leaves of a microbatch
_TIED = POINT + "tie"
_HALF = POINT + "half "  # followed by 0 or 1: a name of what enters or leaves a half


def in_halves(functions: StageFunctions, of: Halves) -> StageFunctions:
    """Return the model whose layers run on halves (`layer_in_halves`).

    For halves of sequences the model is built for two sequence slices, which embedding and head
    get one by one, too: a device with a shard of the sequence has one of each half.

    Raises `ValueError` for halves of sequences where a kind has no state, or the model outputs.
    """
    if of == "sequence" and functions.outputs is not None:
        raise ValueError("a model has no outputs of halves of sequences: run it on full ones.")
    kinds = {name: layer_in_halves(kind, of) for name, kind in functions.kinds_by_name.items()}
    if of == "rows":
        return replace(functions, kinds=kinds)

    def embed(embed_head: Tree, rows: Tree) -> jax.Array:
        own, of_half = _apply(_twice, embed_head), _split_rows(rows, of)
        return lax.concatenate([functions.embed(*half) for half in zip(own, of_half)], 1)

    def head(embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        own, of_half = _apply(_twice, embed_head), _split_rows(rows, of)
        first, second = map(functions.head, own, _split(x, of), of_half)
        return first + second

    def count(rows: Tree) -> jax.Array:
        first, second = map(functions.count, _split_rows(rows, of))
        return first + second

    return replace(functions, embed=embed, kinds=kinds, head=head, count=count)


def layer_in_halves(kind: LayerKind, of: Halves) -> LayerKind:
    """Return the kind whose layer runs the given one on the first and on the second half.

    Results are those of the kind where a layer treats every row, or every sequence slice, alone.
    What it computes for all tokens of a call together differs as it does between two microbatches:
    which tokens exceed a capacity of the experts, and fp8 scales of the current values. Residuals
    are those of both halves. The result pairs with no gradient (`LayerKind.pair`), whose order
    would be another.

    Raises `ValueError` where the kind has no state, for halves of sequences.
    """
    if of == "sequence" and kind.state is None:
        raise ValueError(
            "the second half of a sequence reads the state that the first one returns: give the "
            "layer kind a state, or halve the rows."
        )

    def layer(params: Tree, x: jax.Array, context: Context) -> LayerOutput:
        weights = _apply(_twice, (params, context.embed_head))
        observed = _apply(_observed_twice, {n: context.variables[n] for n in kind.statistics})
        rows, xs, variables = _split_rows(context.rows, of), _split(x, of), context.variables

        def run(half: int, state: Tree) -> LayerOutput:
            own, embed_head = weights[half]
            every = {**variables, **observed[half]} if kind.statistics else variables
            seen = Context(rows[half], context.index, state, every, embed_head)
            output = kind.layer(own, _enter(xs[half], half), seen)
            return output._replace(y=_enter(output.y, half))

        if of == "rows":
            first, second = map(run, range(2), context.state or (None, None))
            state = None if kind.state is None else (first.state, second.state)
        else:
            assert kind.state is not None
            first = run(0, kind.state(xs[0], rows[0]))
            second, state = run(1, jax.tree.map(_hand_on, first.state)), None
        y = lax.concatenate([first.y, second.y], _AXES[of])
        return LayerOutput(y, state, _join(first.aux, second.aux, of))

    def state(x: jax.Array, rows: Tree) -> tuple[Tree, Tree]:
        assert kind.state is not None
        first, second = map(kind.state, _split(x, of), _split_rows(rows, of))
        return first, second

    between = state if kind.state and of == "rows" else None
    return replace(kind, layer=layer, state=between, pair=None)


def tie(x: jax.Array, values: Tree, halves: Halves | None) -> tuple[jax.Array, Tree]:
    """Return x and values behind a barrier that neither passes before the other.

    Of x in halves the first one is tied. If it waited for the second half, too, the collectives at
    both ends of every layer would have nothing beside them. In phases the barrier is the one at the
    end of the phase in which x is computed.
    """
    if halves is None:
        return lax.optimization_barrier((x, values))
    first, second = _split(x, halves)
    first, values = lax.optimization_barrier((checkpoint_name(first, _TIED), values))
    return lax.concatenate([first, second], _AXES[halves]), values


def find_ties(jaxpr: Jaxpr) -> Callable[[JaxprEqn], bool]:
    """Return whether an equation of the jaxpr is the barrier of a `tie` of halves."""
    named = {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and eqn.params["name"] == _TIED
    }

    def is_tie(eqn: JaxprEqn) -> bool:
        first = eqn.invars[:1] if eqn.primitive.name == "optimization_barrier" else []
        return any(isinstance(var, Var) and var in named for var in first)

    return is_tie


def half_named(eqn: JaxprEqn) -> int | None:
    """The half of whose values an equation names one, 0 or 1; None: it names none."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith(_HALF):
        return None
    return int(eqn.params["name"].removeprefix(_HALF))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _named(x: jax.Array, half: int, before: int) -> jax.Array:
    """Return x, a value of half `before`, with the name of `half`; its gradient goes back."""
    return checkpoint_name(x, f"{_HALF}{half}")


_named.defvjp(
    lambda x, half, before: (_named(x, half, before), None),
    lambda half, before, _, dx: (_named(dx, before, half),),
)


def _enter(x: jax.Array, half: int) -> jax.Array:
    """Return x or y of a half with its name."""
    return _named(x, half, half)


def _hand_on(state: jax.Array) -> jax.Array:
    """Return an array of the first half's state as one of the second half."""
    return _named(state, 1, 0)


def _split(x: jax.Array, of: Halves) -> Sequence[jax.Array]:
    axis = _AXES[of]
    if x.shape[axis] % 2:
        what = "rows" if of == "rows" else "tokens in a row"
        raise ValueError(
            f"a layer in halves gets an array of shape {list(x.shape)}: give it an even number "
            f"of {what}."
        )
    return lax.split(x, (x.shape[axis] // 2,) * 2, axis)


def _split_rows(rows: Tree, of: Halves) -> tuple[Tree, Tree]:
    """Return the rows of both halves; those of sequences have the numbers of their slices."""
    halves = _apply(lambda leaf: _split(leaf, of), rows)
    if of == "rows":
        return halves
    examples = len(jax.tree.leaves(rows)[0])
    # These are constants, by which XLA knows how many earlier slices there are.
    first, second = (
        {**of_half, "slice": np.full(examples, half, np.int32)}
        for half, of_half in enumerate(halves)
    )
    return first, second


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


def _join(first: Aux, second: Aux, of: Halves) -> Aux:
    """The auxiliary outputs of both halves; raises `ValueError` for values of parts of a row."""

    def by_name(of: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {name: of(value, other[name]) for name, value in one.items()}

    def add(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        return one[0] + other[0], one[1] + other[1]

    if of == "sequence" and first.per_example:
        raise ValueError(
            f"layers have no values of examples ({', '.join(first.per_example)}) in halves of "
            f"sequences: run them on full ones."
        )
    return Aux(
        by_name(add, first.losses, second.losses),
        by_name(jnp.add, first.sums, second.sums),
        by_name(jnp.maximum, first.maxima, second.maxima),
        by_name(lambda *both: jnp.concatenate(both), first.per_example, second.per_example),
    )
