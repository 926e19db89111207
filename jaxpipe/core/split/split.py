"""Split a layer, traced once, into F, B and W.

Forward and backward of a layer are traced together into one flat jaxpr, in which every equation
either depends on the gradients at the outputs (backward) or does not (forward). Then

  F = the forward equations that the outputs and the residuals depend on;
  B = the backward equations that `dx`, the gradients of vectors (norm gains) and those of matrices
      that multiply the state depend on;
  W = the other backward equations, on which the gradients of matrices depend;
  R = the forward equations that the residuals depend on, if they are recomputed ahead of B.

`jaxpipe.core.split.crossing` finds the values that cross between them.

With sequence slices, a layer takes a state (keys and values, say) in its context and returns the
next one in its output. The state is no residual: B gets it as the last slice left it, which must
give the same gradients as this slice's own state (the layer masks what later slices added). Of a
recurrent state the one that the layer received is a residual, as x is. Along with `dy`, B gets the
gradient at the state that later slices left.

The cotangents of a layer's auxiliary losses are constants known before F; B and W take them as an
argument, and nothing is stored for them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxpipe.core.contract import Context, LayerOutput, Tree
from jaxpipe.core.mesh.flags import merge, select
from jaxpipe.core.split.crossing import (
    POLICIES,
    Crossing,
    Policy,
    Residuals,
    find_crossing,
    find_gradients_of_state,
)
from jaxpipe.core.split.jaxpr import (
    Labelled,
    names_axis,
    reads,
    shape_of,
    trace_labelled,
    unrounded,
)
from jaxpipe.core.split.phases import has_halves, run_in_phases
from jaxpipe.core.split.ports import Cotangent, Ports, Weights
from jaxpipe.core.split.running import run_slice

Layer = Callable[[Tree, Any, Context], LayerOutput]


@dataclass(frozen=True)
class LayerSplit:
    """F, B and W of one layer, as made by `split_layer`.

    The methods take parameters, x and context of the shapes that were traced. B and W take the
    context with the state as the last slice left it.

    Attributes:
      output: shapes and dtypes of what the layer returns.
    """

    output: LayerOutput
    _closed: ClosedJaxpr
    _ports: Ports
    _crossing: Crossing

    def under(
        self, policy: Policy, keep: tuple[str, ...] = (), recomputed: Policy | None = None
    ) -> "LayerSplit":
        """Return the split under other policies; the arguments are those of `split_layer`."""
        crossing = find_crossing(self._closed.jaxpr, self._ports, policy, keep, recomputed)
        return replace(self, _crossing=crossing)

    @cached_property
    def residuals(self) -> Residuals:
        """Shapes and dtypes of the residuals that are stored per microbatch."""
        return jax.tree.map(shape_of, self._crossing.residuals)

    @cached_property
    def stash(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the W stash that is stored per microbatch."""
        return _shapes(self._crossing.stash)

    @property
    def uses_of_embed_head(self) -> Tree:
        """Whether the layer has a gradient at each parameter of embedding and head."""
        return jax.tree.map(
            lambda gradient: gradient is not None, self._ports.gradients.embed_head,
            is_leaf=lambda gradient: gradient is None,
        )  # fmt: skip

    @property
    def handed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What B hands to W behind a barrier in BW: the W stash, and gathered values."""
        return (*self.stash, *_shapes(self._crossing.gathered))

    @property
    def has_collectives(self) -> bool:
        """Whether the layer communicates over a mesh axis."""
        return any(map(names_axis, self._closed.effects))

    def forward(
        self, params: Tree, x: jax.Array, context: Context
    ) -> tuple[LayerOutput, Residuals]:
        """Run F; return the layer's output and the residuals that F stores."""
        state = dict(zip(jax.tree.leaves(self._ports.state), jax.tree.leaves(context.state)))
        wanted = self._ports.output, self._crossing.residuals.of_f
        effects = self._crossing.effects_in_f
        return self._run(params, context, {self._ports.x: x} | state, wanted, effects)

    def recompute(self, params: Tree, context: Context, for_r: tuple[Any, ...]) -> Residuals:
        """Run R: compute the residuals for B and W again, from what F stored for R."""
        crossing = self._crossing.residuals
        assert crossing.for_r is not None
        known = dict(zip(crossing.for_r, for_r))
        return self._in_phases(
            partial(self._run, params, context, known, crossing._replace(for_r=None))
        )

    def backward_input(
        self, params: Tree, context: Context, residuals: Residuals, dy: Cotangent
    ) -> tuple[Cotangent, Weights, tuple[jax.Array, ...]]:
        """Run B; return gradients at the input, of vectors (else None), and the W stash."""
        known = self._known(context, residuals, dy)
        return self._in_phases(partial(self._run_b, params, context, known, self._crossing.stash))

    def backward_weight(
        self,
        params: Tree,
        context: Context,
        for_w: tuple[jax.Array, ...],
        stash: tuple[jax.Array, ...],
        dlosses: Any = None,
    ) -> Weights:
        """Run W; return the gradients of matrices (else None)."""
        known = dict(zip(self._crossing.residuals.for_w, for_w))
        known |= dict(zip(self._crossing.stash, stash)) | self._seed(dlosses)
        return self._run_w(params, context, known)

    def backward(
        self, params: Tree, context: Context, residuals: Residuals, dy: Cotangent
    ) -> tuple[Cotangent, Weights]:
        """Run B, then W; return gradients at the input and of every trained parameter.

        The barrier makes XLA compute the stash once: without it XLA on CPU computes it for the
        matmuls of B and again for those of W, and BW takes 5 % longer. W reuses B's all-gathers.
        """
        known = self._known(context, residuals, dy)
        handed = (*self._crossing.stash, *self._crossing.gathered)
        dx, vectors, for_w = self._run_b(params, context, known, handed)
        known |= dict(zip(handed, lax.optimization_barrier(for_w)))
        matrices = self._run_w(params, context, known)
        gradients = jax.tree.map(
            lambda vector, matrix: matrix if vector is None else vector,
            vectors, matrices, is_leaf=lambda leaf: leaf is None,
        )  # fmt: skip
        return dx, gradients

    def _run_b(
        self, params: Tree, context: Context, known: dict[Var, Any], handed: tuple[Var, ...]
    ) -> tuple[Cotangent, Weights, tuple[Any, ...]]:
        """Return gradients at the input and of vectors, and the values `handed` to W."""
        wanted = self._ports.dx, self._ports.gradients_of_b, handed
        effects = self._crossing.effects_in_b
        return self._run(params, context, known, wanted, effects)

    def _in_phases(self, run: Callable[[], Tree]) -> Tree:
        """Return `run()`; its equations run in phases if the layer runs in halves.

        BW needs no phases, where W is beside B's collectives. F of a chunk has phases of all its
        layers.
        """
        return run_in_phases(run) if has_halves(self._closed.jaxpr) else run()

    def _run_w(self, params: Tree, context: Context, known: dict[Var, Any]) -> Weights:
        return self._run(params, context, known, self._ports.gradients_of_w)

    def _known(self, context: Context, residuals: Residuals, dy: Cotangent) -> dict[Var, Any]:
        ports, crossing = self._ports, self._crossing.residuals
        known = dict(zip(ports.left_state, jax.tree.leaves(context.state)))
        known |= dict(zip((*crossing.for_b, *crossing.for_w), (*residuals.for_b, *residuals.for_w)))
        known |= {ports.dy.value: dy.value} | dict(zip(ports.dy.state, dy.state))
        return known | self._seed(dy.losses)

    def _seed(self, dlosses: Any) -> dict[Var, Any]:
        return dict(zip(jax.tree.leaves(self._ports.dy.losses), jax.tree.leaves(dlosses)))

    def _run(
        self,
        params: Tree,
        context: Context,
        known: dict[Var, Any],
        outputs: Tree,
        effects: tuple[JaxprEqn, ...] = (),
    ) -> Tree:
        """Return the values of a tree of variables, given the parameters and the context."""
        values = dict(zip(self._closed.jaxpr.constvars, self._closed.consts))
        data = params, context._replace(state=None)
        values |= dict(zip(jax.tree.leaves((self._ports.params, self._ports.context)),
                          jax.tree.leaves(data)))  # fmt: skip
        return run_slice(self._closed.jaxpr, values | known, outputs, effects)


def inexact(tree: Tree) -> tuple[Any, ...]:
    """Return the leaves of a tree that can be differentiated, in order."""
    return tuple(leaf for leaf in jax.tree.leaves(tree) if _is_inexact(leaf))


def _with_inexact(tree: Tree, leaves: tuple[Any, ...]) -> Tree:
    """Return a tree with the leaves that can be differentiated replaced, in order."""
    new = iter(leaves)
    return jax.tree.map(lambda leaf: next(new) if _is_inexact(leaf) else leaf, tree)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def split_layer(
    layer: Layer,
    params: Tree,
    x: Any,
    context: Context,
    policy: Policy = POLICIES["none"],
    keep: tuple[str, ...] = (),
    statistics: tuple[str, ...] = (),
    trained: Weights | None = None,
    recomputed: Policy | None = None,
    *,
    recurrent: bool = False,
) -> LayerSplit:
    """Trace a layer at the given shapes and split it into F, B and W.

    Inside `shard_map` the layer may use collectives over bound axes. An inner loop, or a layer
    already wrapped in `jax.checkpoint`, is one opaque equation: B then computes the gradients of
    its weights.

    Args:
      layer: `(params, x, context) -> LayerOutput`.
      params, x, context: arrays or `jax.ShapeDtypeStruct`.
      policy: says which forward values F may store.
      keep: names of values that F stores whatever the policy says, if B or W reads them.
      statistics: names of statistics variables.
      trained: a flag for every parameter, of the layer and in `context.embed_head`, whether it has
        a gradient; None: all have.
      recomputed: says which forward values R may store; None: there is no R.
      recurrent: the state is recurrent (`LayerKind.recurrent`).

    Raises `ValueError` where y is not one array, or B or W would need the state from before this
    slice, and it is not `recurrent`.

    For `x + tanh(x @ up)`, F stores the tanh for B and x for W; B stashes the gradient at the
    matmul's output for W:

    >>> def layer(params, x, context):
    ...     return LayerOutput(x + jnp.tanh(x @ params["up"]))
    >>> given = {"up": jnp.ones((8, 8))}, jnp.ones((2, 6, 8)), Context(rows={})
    >>> split = split_layer(layer, *given)
    >>> [leaf.shape for leaf in split.residuals.for_b + split.residuals.for_w]
    [(2, 6, 8), (2, 6, 8)]
    >>> [leaf.shape for leaf in split.stash]
    [(2, 6, 8)]
    """
    params, x, context = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x, context)
    )
    output = jax.eval_shape(layer, params, x, context)
    check_array("y of a layer", output.y)
    if trained is None:
        trained = jax.tree.map(lambda _: True, Weights(params, context.embed_head))
    dy = Cotangent(output.y, inexact(output.state), output.aux.loss_sums)
    data, state = context._replace(state=None), context.state
    both = partial(_forward_and_backward, layer, trained, statistics)
    closed, ports = _complete(trace_labelled(both, params, data, x, state, dy), recurrent)
    crossing = find_crossing(closed.jaxpr, ports, policy, keep, recomputed)
    return LayerSplit(output, closed, ports, crossing)


def _forward_and_backward(
    layer: Layer, trained: Weights, statistics: tuple[str, ...],
    params: Tree, data: Context, x: Any, state: Tree, dy: Cotangent,
) -> tuple[LayerOutput, Cotangent, Weights]:  # fmt: skip
    """Run a layer and its VJP; return its output and the gradients at its inputs and parameters.

    `data` is the context without its state.
    """
    weights = Weights(params, data.embed_head)

    def differentiated(
        used: Weights, x: Any, floats: tuple[Any, ...], seen: Mapping[str, Any]
    ) -> Any:
        params, embed_head = merge(trained, used, weights)
        context = data._replace(state=_with_inexact(state, floats), embed_head=embed_head)
        output = layer(params, x, with_statistics(context, seen))
        return (output.y, inexact(output.state), output.aux.loss_sums), output

    seen = {name: data.variables[name] for name in statistics}
    inputs = select(trained, weights), x, inexact(state), seen
    _, pull, output = jax.vjp(differentiated, *inputs, has_aux=True)
    gradients, dx, dstate, of_statistics = pull((dy.value, dy.state, dy.losses))
    return output, Cotangent(dx, dstate, statistics=of_statistics), gradients


def _complete(traced: Labelled, recurrent: bool) -> tuple[ClosedJaxpr, Ports]:
    """Return the jaxpr of `_forward_and_backward` and its ports, with unrounded gradients.

    Parameters of embedding and head that the layer does not use have no gradient.
    """
    closed, inputs, outputs = traced
    ports = Ports(*inputs, *outputs)  # in the order of the arguments and results
    read = set(reads(closed.jaxpr.eqns, ()))
    used = jax.tree.map(lambda var: var in read, ports.context.embed_head)
    gradients = ports.gradients
    gradients = gradients._replace(embed_head=select(used, gradients.embed_head))
    closed, gradients = unrounded(closed, gradients)
    ports = ports._replace(gradients=gradients, recurrent=recurrent)
    return closed, ports._replace(of_state=find_gradients_of_state(closed.jaxpr, ports))


def check_array(what: str, value: Tree) -> None:
    """Raise `ValueError` where a value that stages hand on is a tree, not one array."""
    if not jax.tree_util.all_leaves([value]):
        count = len(jax.tree.leaves(value))
        raise ValueError(
            f"{what} is a {type(value).__name__} of {count} arrays, but stages hand on one: stack "
            f"or concatenate them, in the embedding and in every layer."
        )


def with_statistics(context: Context, values: Mapping[str, Any]) -> Context:
    """Return the context with variables replaced by name, so that they can be differentiated."""
    return context._replace(variables={**context.variables, **values}) if values else context


def _shapes(variables: Iterable[Var]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(map(shape_of, variables))
