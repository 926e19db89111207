"""One kind of layer as a step runs it: traced at a device's shapes, and cut if it trains."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.contract import Context, LayerKind, LayerOutput, Side
from jaxpipe.pipeline.cut import Policy, Residuals
from jaxpipe.pipeline.rings import NOTHING, RingPlan
from jaxpipe.pipeline.split import LayerSplit, split_layer
from jaxpipe.schedule import Tables

Tree = Any


@dataclass(frozen=True)
class RunKind:
    """A kind of layer at the shapes of one step.

    `output` and `state` have the shapes of what it returns and is given; `split` are its pieces,
    None in a forward-only pass. `rings` says where they leave what waits.
    """

    kind: LayerKind
    output: LayerOutput
    state: Tree
    split: LayerSplit | None
    rings: RingPlan | None = None

    @classmethod
    def trace(
        cls, name: str, kind: LayerKind, params: Tree, x: Any, context: Context,
        policy: Policy | None,
    ) -> "RunKind":  # fmt: skip
        """Trace it, before it has rings; without a `policy` for a forward-only pass.

        Raises `ValueError` where y is not like x, or the state it returns not like the one given.
        """
        state = None
        if kind.state is not None:
            state = jax.eval_shape(kind.state, x, context.rows)
        context = context._replace(state=state)
        output = jax.eval_shape(kind.layer, params, x, context)
        _check_alike(name, "y", output.y, "x", x)
        _check_alike(name, "the state that it returns", output.state, "the one it is given", state)
        split = None
        if policy is not None:
            split = split_layer(kind.layer, params, x, context, policy, kind.keep)
        return cls(kind, output, state, split)

    def with_rings(self, tables: Tables, *, on_host: bool = False) -> "RunKind":
        """The same with rings for the slots of these tables."""
        pairs = bool(tables.pairs)
        rings = RingPlan.of(self.split, self.state, tables.slots_of, pairs=pairs, on_host=on_host)
        return replace(self, rings=rings)

    def forward(
        self, params: Tree, x: jax.Array, context: Context
    ) -> tuple[LayerOutput, Residuals]:
        """F, of which an uncut layer leaves no residuals."""
        if self.split is None:
            return self.kind.layer(params, x, context), NOTHING
        return self.split.forward(params, x, context)


def empty_side(kinds: Iterable[RunKind], microbatches: int) -> Side:
    """Sums of nothing, and the least maxima, by all names that the kinds give."""
    sums, maxima, rows = {}, {}, {}
    for kind in kinds:
        sums |= kind.output.side.sums
        maxima |= kind.output.side.maxima
        rows |= kind.output.side.rows
    sums = {name: jnp.zeros(like.shape, like.dtype) for name, like in sums.items()}
    rows = {name: jnp.zeros((microbatches, *like.shape), like.dtype) for name, like in rows.items()}
    return Side(None, sums, {name: _least(like) for name, like in maxima.items()}, rows)


def add_side(total: Side, more: Side, m: jax.Array) -> Side:
    """All with what a layer makes of the m-th microbatch; names that only `total` has stay."""
    sums = {name: total.sums[name] + value for name, value in more.sums.items()}
    maxima = {name: jnp.maximum(total.maxima[name], value) for name, value in more.maxima.items()}
    rows = {name: total.rows[name].at[m].add(value) for name, value in more.rows.items()}
    return Side(
        total.loss, {**total.sums, **sums}, {**total.maxima, **maxima}, {**total.rows, **rows}
    )


def _least(like: Any) -> jax.Array:
    inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    return jnp.full(like.shape, -jnp.inf if inexact else jnp.iinfo(like.dtype).min, like.dtype)


def _check_alike(kind: str, what: str, got: Tree, other: str, want: Tree) -> None:
    if _types(got) != _types(want):
        raise ValueError(
            f"the layers of kind {kind!r} make {what} as {_types(got)} where {other} is "
            f"{_types(want)}: stages hand on what they take; make both alike in shape and dtype."
        )


def _types(tree: Tree) -> str:
    leaves = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(leaves) or "nothing"
