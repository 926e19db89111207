"""A layer kind traced at a device's shapes, and split into F, B and W if the step trains."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import Aux, Context, LayerKind, LayerOutput, Tree
from jaxpipe.core.executor.ring_buffers import RingBuffers
from jaxpipe.core.jax_internals import keep_outputs
from jaxpipe.core.mesh.flags import is_trained
from jaxpipe.core.mesh.sharding import param_specs_of
from jaxpipe.core.schedule import Tables
from jaxpipe.core.split.crossing import Policy, Residuals
from jaxpipe.core.split.halves import Halves
from jaxpipe.core.split.jaxpr import evaluate
from jaxpipe.core.split.ports import Weights
from jaxpipe.core.split.split import LayerSplit, check_array, split_layer

NOTHING = Residuals((), ())


@dataclass(frozen=True)
class TracedKind:
    """A layer kind at the shapes of one step.

    Attributes:
      name: of the layer kind.
      kind: the layer kind.
      output: shapes and dtypes of what the layer returns.
      state: shapes and dtypes of the state between sequence slices; None: no slices.
      split_if_trained: the layer split into F, B and W; None: forward-only.
      halves: of what the layer runs on halves (`layer_in_halves`); None: of nothing.
    """

    name: str
    kind: LayerKind
    output: LayerOutput
    state: Tree
    split_if_trained: LayerSplit | None
    halves: Halves | None

    @classmethod
    def trace(
        cls, name: str, kind: LayerKind, params: Tree, x: Any, context: Context,
        policy: Policy | None, trained: Tree = None, recomputed: Policy | None = None,
        *, halves: Halves | None = None,
    ) -> "TracedKind":  # fmt: skip
        """Trace a layer kind; `policy` None means a forward-only pass.

        `trained` has a flag for every parameter in `context.embed_head`; `recomputed` is the
        policy of R, if the schedule has R. `halves` says of what the layer runs on halves, if it
        does (`layer_in_halves`).

        Raises `ValueError` where x or y is not one array, or y differs from x, or the returned
        state from the one it takes, in shape or dtype.
        """
        check_array(f"x of the layers of kind {name!r}", x)
        state = None
        if kind.state is not None:
            state = jax.eval_shape(kind.state, x, context.rows)
        context = context._replace(state=state, embed_head=embed_head_of(kind, context.embed_head))
        split = None
        if policy is None:
            output = jax.eval_shape(kind.layer, params, x, context)
        else:
            of_layer = is_trained(param_specs_of(kind.param_specs, params, of_layer=True))
            flags = Weights(of_layer, embed_head_of(kind, trained))
            split = split_layer(
                kind.layer, params, x, context, policy, kind.keep, kind.statistics, flags,
                recomputed, recurrent=kind.recurrent,
            )  # fmt: skip
            output = split.output
        check_array(f"y of the layers of kind {name!r}", output.y)
        _check_alike(name, "y", output.y, "x", x)
        _check_alike(name, "the state that it returns", output.state, "the one it is given", state)
        return cls(name, kind, output, state, split, halves)

    @property
    def split(self) -> LayerSplit:
        """The layer split into F, B and W; a forward-only pass has none."""
        assert self.split_if_trained is not None
        return self.split_if_trained

    def loss_counts(self, params: Tree, x: Any, context: Context) -> Callable[[Tree], Tree]:
        """Return `rows -> {name: number of terms}` of a layer's auxiliary losses in a microbatch.

        Args are arrays or `jax.ShapeDtypeStruct`. Raises `ValueError` where a number depends on
        more than the rows.
        """
        embed_head = embed_head_of(self.kind, context.embed_head)
        others = params, x, context._replace(rows=None, state=self.state, embed_head=embed_head)

        def counts(rows: Tree, params: Tree, x: Any, context: Context) -> dict[str, jax.Array]:
            aux = self.kind.layer(params, x, context._replace(rows=rows)).aux
            return {name: jnp.asarray(count) for name, count in aux.loss_counts.items()}

        made, outputs = jax.make_jaxpr(counts, return_shape=True)(context.rows, *others)
        closed, used = keep_outputs(made)
        if any(used[len(jax.tree.leaves(context.rows)) :]):
            raise ValueError(
                f"the layers of kind {self.name!r} count the terms of an auxiliary loss "
                f"({', '.join(outputs)}) by more than the rows of the microbatch: a step needs the "
                f"number before it runs a layer; compute it from `context.rows` alone."
            )

        def of_rows(rows: Tree) -> Tree:
            leaves = [leaf for leaf, is_used in zip(jax.tree.leaves(rows), used) if is_used]
            values = evaluate(closed, leaves)
            return jax.tree.unflatten(jax.tree.structure(outputs), values)

        return of_rows

    def with_rings(
        self, tables: Tables, layers: int = 1, *, on_host: bool = False
    ) -> "BufferedKind":
        """Return the kind with ring buffers of `layers` layers for these tables."""
        split = self.split_if_trained
        rings = RingBuffers.of(
            split.residuals if split else NOTHING, split.stash if split else (),
            self.state, tables.rank_slots,
            pairs=bool(tables.pairs), layers=layers, on_host=on_host,
        )  # fmt: skip
        return BufferedKind(**vars(self), rings=rings)

    def forward(
        self, params: Tree, x: jax.Array, context: Context
    ) -> tuple[LayerOutput, Residuals]:
        """Run F; in a forward-only pass it returns no residuals."""
        if self.split_if_trained:
            return self.split_if_trained.forward(params, x, context)
        return self.kind.layer(params, x, context), NOTHING


@dataclass(frozen=True)
class BufferedKind(TracedKind):
    """A traced kind with `rings`, the ring buffers of the layers of a ring group."""

    rings: RingBuffers


def embed_head_of(kind: LayerKind, embed_head: Tree) -> Tree:
    """Return `embed_head`, or None if the layers of the kind do not read it."""
    return embed_head if kind.reads else None


def empty_aux(kinds: Iterable[TracedKind], microbatches: int) -> Aux:
    """Return zero sums and the least maxima, for all names of auxiliary outputs of the kinds."""
    sums: dict[str, Any] = {}
    maxima: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for kind in kinds:
        sums |= kind.output.aux.sums
        maxima |= kind.output.aux.maxima
        rows |= kind.output.aux.per_example
    sums = {name: jnp.zeros(like.shape, like.dtype) for name, like in sums.items()}
    rows = {name: jnp.zeros((microbatches, *like.shape), like.dtype) for name, like in rows.items()}
    return Aux({}, sums, {name: _least(like) for name, like in maxima.items()}, rows)


def empty_statistics(kinds: Iterable[TracedKind], variables: Tree) -> dict[str, jax.Array]:
    """Return zeros for every statistics variable of the kinds, by name."""
    names = {name for kind in kinds for name in kind.kind.statistics}
    return {name: jnp.zeros_like(variables[name]) for name in sorted(names)}


def elementwise_max(
    total: Mapping[str, jax.Array], more: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return elementwise maxima by name; names that only `total` has stay."""
    return {**total, **{name: jnp.maximum(total[name], value) for name, value in more.items()}}


def add_aux(total: Aux, more: Aux, m: jax.Array) -> Aux:
    """Add a layer's auxiliary outputs for microbatch m; names that only `total` has stay."""
    sums = {name: total.sums[name] + value for name, value in more.sums.items()}
    rows = {
        name: total.per_example[name].at[m].add(value) for name, value in more.per_example.items()
    }
    maxima = elementwise_max(total.maxima, more.maxima)
    return Aux(total.losses, {**total.sums, **sums}, maxima, {**total.per_example, **rows})


def _least(like: Any) -> jax.Array:
    inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    return jnp.full(like.shape, -jnp.inf if inexact else jnp.iinfo(like.dtype).min, like.dtype)


def _check_alike(kind: str, what: str, value: Tree, other: str, want: Tree) -> None:
    if _types(value) != _types(want):
        raise ValueError(
            f"the layers of kind {kind!r} make {what} as {_types(value)} where {other} is "
            f"{_types(want)}: stages hand on what they take; make both alike in shape and dtype."
        )


def _types(tree: Tree) -> str:
    leaves = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(leaves) or "nothing"
