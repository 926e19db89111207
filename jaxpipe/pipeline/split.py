"""Split a layer, traced once, into F, B and W.

Forward and backward of a layer are traced together into one flat jaxpr, in which every equation
either depends on the gradients at the outputs (backward) or does not (forward). Then

  F = the forward equations that the outputs and the residuals depend on;
  B = the backward equations that `dx` and the gradients of vectors (norm gains) depend on;
  W = the other backward equations, on which the gradients of matrices depend.

`jaxpipe.pipeline.cut` finds the values that cross between them.

With sequence slices, a layer takes a state (keys and values, say) in its context and returns the
next one in its output. The state is never a residual: B gets it as the last slice left it, which
must give the same gradients as this slice's own state (the layer masks what later slices added).
Along with `dy`, B gets the gradient at the state that later slices left.

The cotangent of a layer's auxiliary loss is a constant known before F; B and W take it as an
argument, and nothing is stored for it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxpipe.contract import Context, LayerOutput
from jaxpipe.pipeline.cut import POLICIES, Crossing, Policy, Ports, Residuals, find_crossing
from jaxpipe.pipeline.jaxpr import run_slice, trace_flat, unrounded

Tree = Any
Layer = Callable[[Tree, Any, Context], LayerOutput]


class Cotangent(NamedTuple):
    """Gradients at the outputs of a layer, or at its inputs.

    Attributes:
      value: gradient at y or x.
      state: gradients at the inexact leaves of the state.
      loss: gradient at the auxiliary loss, where the layer has one.
      statistics: gradients at the statistics variables, by name.
    """

    value: Any
    state: tuple[Any, ...] = ()
    loss: Any = None
    statistics: Mapping[str, Any] = {}


@dataclass(frozen=True)
class LayerSplit:
    """F, B and W of one layer, as made by `split_layer`.

    The methods take parameters, x and context of the shapes that were traced. B and W take the
    context with the state as the last slice left it.

    Attributes:
      residuals, stash: shapes and dtypes of what is stored per microbatch.
      output: shapes and dtypes of what the layer returns.
      statistics: names of the statistics variables.
    """

    residuals: Residuals
    stash: tuple[jax.ShapeDtypeStruct, ...]
    output: LayerOutput
    statistics: tuple[str, ...]
    _closed: ClosedJaxpr
    _ports: Ports
    _crossing: Crossing

    def forward(
        self, params: Tree, x: jax.Array, context: Context
    ) -> tuple[LayerOutput, Residuals]:
        """Run F; return the layer's output and the residuals."""
        ports, kept = self._ports, self._crossing.residuals
        known = {ports.x: x} | dict(zip(ports.state, jax.tree.leaves(context.state)))
        wanted = [
            ports.y,
            *ports.next_state,
            *ports.loss,
            *ports.other_outputs,
            *kept.for_b,
            *kept.for_w,
        ]
        effects = self._crossing.effects_in_f
        values = iter(self._run(params, context, known, wanted, effects))
        output = jax.tree.map(lambda _: next(values), self.output)
        values = tuple(values)
        cut = len(kept.for_b)
        return output, Residuals(values[:cut], values[cut:])

    def backward_input(
        self, params: Tree, context: Context, residuals: Residuals, dy: Cotangent
    ) -> tuple[Cotangent, Tree, tuple[jax.Array, ...]]:
        """Run B; return gradients at the input, of vectors (None for matrices), and the W stash."""
        known = self._known(context, residuals, dy)
        dx, vectors, stash = self._run_b(params, context, known, self._crossing.stash)
        return dx, self._gradients(params, vectors, in_b=True), stash

    def backward_weight(
        self,
        params: Tree,
        context: Context,
        for_w: tuple[jax.Array, ...],
        stash: tuple[jax.Array, ...],
        dloss: Any = None,
    ) -> Tree:
        """Run W; return the gradients of matrices (None for vectors)."""
        known = dict(zip(self._crossing.residuals.for_w, for_w))
        known |= dict(zip(self._crossing.stash, stash)) | self._seed(dloss)
        return self._run_w(params, context, known)

    def backward(
        self, params: Tree, context: Context, residuals: Residuals, dy: Cotangent
    ) -> tuple[Cotangent, Tree]:
        """Run B, then W; return gradients at the input and of every parameter.

        The barrier makes XLA compute the stash once: without it XLA on CPU computes it for the
        matmuls of B and again for those of W, and BW takes 5 % longer. W reuses B's all-gathers.
        """
        known = self._known(context, residuals, dy)
        handed = (*self._crossing.stash, *self._crossing.gathered)
        dx, vectors, rest = self._run_b(params, context, known, handed)
        vectors = self._gradients(params, vectors, in_b=True)
        known |= dict(zip(handed, lax.optimization_barrier(rest)))
        matrices = self._run_w(params, context, known)
        either = lambda vector, matrix: matrix if vector is None else vector  # noqa: E731
        return dx, jax.tree.map(either, vectors, matrices, is_leaf=lambda leaf: leaf is None)

    def _run_b(
        self, params: Tree, context: Context, known: dict[Var, Any], handed: tuple[Var, ...]
    ) -> tuple[Cotangent, list[Any], tuple[Any, ...]]:
        """Return gradients at the input, gradients of vectors, and the values `handed` to W."""
        made = self._ports.made_by_b
        effects = self._crossing.effects_in_b
        dx, *values = self._run(params, context, known, [*made, *handed], effects)
        handed = tuple(values[len(made) - 1 :])
        rest = iter(values[: len(made) - 1])
        dstate = tuple(next(rest) for _ in self._ports.dstate_before)
        observed = {name: next(rest) for name in self.statistics}
        return Cotangent(dx, dstate, statistics=observed), list(rest), handed

    def _run_w(self, params: Tree, context: Context, known: dict[Var, Any]) -> Tree:
        values = self._run(params, context, known, self._ports.gradients_of(b=False))
        return self._gradients(params, values, in_b=False)

    def _gradients(self, params: Tree, values: Iterable[jax.Array], *, in_b: bool) -> Tree:
        """Return a tree like `params`: `values` where B (or W) has the gradient, else None."""
        values = iter(values)
        leaves = [next(values) if b is in_b else None for b in self._ports.in_b]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def _known(self, context: Context, residuals: Residuals, dy: Cotangent) -> dict[Var, Any]:
        ports, kept = self._ports, self._crossing.residuals
        known = dict(zip(ports.next_state, jax.tree.leaves(context.state)))
        known |= dict(zip((*kept.for_b, *kept.for_w), (*residuals.for_b, *residuals.for_w)))
        known |= {ports.dy: dy.value} | dict(zip(ports.dstate, dy.state))
        return known | self._seed(dy.loss)

    def _seed(self, dloss: Any) -> dict[Var, Any]:
        return {var: dloss for var in self._ports.dloss}

    def _run(
        self,
        params: Tree,
        context: Context,
        known: dict[Var, Any],
        outputs: list[Any],
        effects: tuple[JaxprEqn, ...] = (),
    ) -> list[Any]:
        jaxpr = self._closed.jaxpr
        given = dict(zip(jaxpr.constvars, self._closed.consts))
        data = jax.tree.leaves((params, context._replace(state=None)))
        given |= dict(zip(jaxpr.invars, data))
        return run_slice(jaxpr, given | known, outputs, effects)


def inexact(tree: Tree) -> tuple[Any, ...]:
    """Return the leaves of a tree that can be differentiated, in order."""
    return tuple(leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def split_layer(
    layer: Layer,
    params: Tree,
    x: Any,
    context: Context,
    policy: Policy = POLICIES["none"],
    keep: tuple[str, ...] = (),
    statistics: tuple[str, ...] = (),
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

    Raises `ValueError` where B would need the state from before this slice, or W any state.

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
    seed = () if output.aux.loss is None else (output.aux.loss,)

    def both(params: Tree, data: Context, x: Any, state: Tree, dy: tuple[Any, ...]) -> Any:
        leaves, form = jax.tree.flatten(state)

        def differentiated(
            params: Tree, x: Any, floats: tuple[Any, ...], seen: Mapping[str, Any]
        ) -> Any:
            given = iter(floats)
            mixed = [
                next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves
            ]
            context = with_statistics(data._replace(state=jax.tree.unflatten(form, mixed)), seen)
            output = layer(params, x, context)
            loss = () if output.aux.loss is None else (output.aux.loss,)
            return (output.y, inexact(output.state), loss), output

        seen = {name: data.variables[name] for name in statistics}
        _, pull, output = jax.vjp(differentiated, params, x, inexact(state), seen, has_aux=True)
        dparams, dx, dstate, left = pull(dy)
        return jax.tree.leaves(output), dx, dstate, [left[name] for name in statistics], dparams

    data, state = context._replace(state=None), context.state
    dy = output.y, inexact(output.state), seed
    closed = trace_flat(both, params, data, x, state, dy)
    ports = _ports(closed, params, state, output, len(statistics))
    crossing = find_crossing(closed.jaxpr, ports, policy, keep)
    return LayerSplit(
        residuals=Residuals(*map(_shapes, crossing.residuals)),
        stash=_shapes(crossing.stash),
        output=output,
        statistics=statistics,
        _closed=closed,
        _ports=ports,
        _crossing=crossing,
    )


def with_statistics(context: Context, values: Mapping[str, Any]) -> Context:
    """Return the context with variables replaced by name, so that they can be differentiated."""
    return context._replace(variables={**context.variables, **values}) if values else context


def _ports(
    closed: ClosedJaxpr, params: Tree, state: Tree, output: LayerOutput, observed: int
) -> Ports:
    """Name the variables of the traced function, by the order of its arguments and results."""
    states, floats = len(jax.tree.leaves(state)), len(inexact(state))
    seeds = len(jax.tree.leaves(output.aux.loss))
    inputs, outputs = closed.jaxpr.invars, closed.jaxpr.outvars
    (x, *rest) = inputs[-(2 + states + floats + seeds) :]
    state_vars, (dy, *after) = rest[:states], rest[states:]
    made = len(jax.tree.leaves(output))
    (y, *beside), (dx, *gradients) = outputs[:made], outputs[made:]
    return Ports(
        x=x,
        state=tuple(state_vars),
        dy=dy,
        dstate=tuple(after[:floats]),
        dloss=tuple(after[floats:]),
        y=y,
        next_state=tuple(beside[:states]),
        loss=tuple(beside[states : states + seeds]),
        other_outputs=tuple(beside[states + seeds :]),
        dx=dx,
        dstate_before=tuple(gradients[:floats]),
        statistics=tuple(gradients[floats : floats + observed]),
        gradients=tuple(unrounded(closed.jaxpr, gradients[floats + observed :])),
        in_b=tuple(len(leaf.shape) < 2 for leaf in jax.tree.leaves(params)),
    )


def _shapes(variables: Iterable[Var]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables)
