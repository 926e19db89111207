"""One layer, traced once, cut into F, B and W.

Forward and backward of a layer are traced together into one flat jaxpr, in which every equation
either depends on the output gradient `dy` (backward) or does not (forward). Then

  F = the forward equations that reach `y` and the residuals;
  B = the backward equations that reach `dx` and the gradients of vectors (norm gains);
  W = the other backward equations, those that reach the gradients of matrices.

Residuals are the forward values that B or W reads *and that depend on x*; what depends only on
parameters, constants or the microbatch's own data is computed again, never stored, and so is what
elementwise equations make of other residuals. The stash is what W reads of B. Rematerialisation is
the same cut made elsewhere: a policy says which forward values may be stored, and B computes the
others again from those.

Slices of a sequence leave a state for each other (keys and values, say), which then travels with
`x`: a layer takes `(x, state)` and returns `(y, state)`. None of it is a residual: B is given the
state as the last slice left it, which must serve where this slice's own did (what later slices have
added is masked), and with `dy` the gradient at it that later slices left.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpipe.pipeline.jaxpr import (
    dependents,
    equations_to,
    reads,
    run_slice,
    trace_flat,
    variables_in,
)

Tree = Any
Layer = Callable[[Tree, Tree, Tree], Tree]  # (params, x, microbatch) -> y
Policy = Callable[..., bool]  # (primitive, *avals, **params) -> may this value be stored?

# One-operand equations that only rearrange, widen or narrow: cheaper to repeat than to store. What
# is gathered over tp is stored in parts too, and gathered again (Korthikanti et al. 2022, 4.2.2).
_LAYOUT = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg",
    "reshape", "squeeze", "transpose",
}  # fmt: skip


def _save_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Store the outputs of weight matrices, summed over devices, and of fused attention."""
    if primitive.name.startswith(("dot_product_attention", "psum", "reduce_scatter")):
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)


# Computed value by value from operands of the same shape, or only moved about, on one device.
_ELEMENTWISE = _LAYOUT - {"all_gather"} | {
    "abs", "add", "add_any", "and", "concatenate", "cos", "div", "eq", "erf", "exp", "expm1", "ge",
    "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "not", "one_minus_square", "or", "pad", "pow", "rsqrt", "select_n", "sign", "sin",
    "slice", "split", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
}  # fmt: skip


POLICIES: dict[str, Policy] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "selective": _save_products,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Residuals(NamedTuple):
    """Forward values kept for the backward: `for_b` until B, `for_w` until W."""

    for_b: tuple[Any, ...]
    for_w: tuple[Any, ...]


@dataclass(frozen=True)
class LayerSplit:
    """The pieces of one layer; made by `split_layer`, free of the values it was traced with.

    `residuals` and `stash` hold the shapes and dtypes of what is stored per microbatch. The
    methods take the layer's parameters, microbatch and x in the form they were traced in; dy comes
    and dx is returned in the forms of y and x. `state`, where there is one, is that part of y, as
    the last slice left it.
    """

    residuals: Residuals
    stash: tuple[jax.ShapeDtypeStruct, ...]
    _closed: ClosedJaxpr  # (params, microbatch, x, dy) -> (y, dx, gradients)
    _arguments: Any  # treedef of (params, microbatch)
    _x: "_Variables"
    _y: "_Variables"
    _in_b: tuple[bool, ...]  # per parameter leaf: does B make its gradient?
    _kept: Residuals  # the residuals, and below the stash, as variables
    _stashed: tuple[Var, ...]
    _gathered: tuple[Var, ...]  # what both B and W gather of values that are stored in parts

    def forward(self, params: Tree, x: Tree, microbatch: Tree) -> tuple[Tree, Residuals]:
        """F: the output and the residuals."""
        outputs = [*self._y.values, *self._kept.for_b, *self._kept.for_w]
        made = self._run(params, microbatch, self._x.values_of(x), outputs)
        y, kept = self._y.tree_of(made), made[len(self._y.values) :]
        cut = len(self._kept.for_b)
        return y, Residuals(tuple(kept[:cut]), tuple(kept[cut:]))

    def backward_input(
        self, params: Tree, microbatch: Tree, residuals: Residuals, dy: Tree, state: Tree = None
    ) -> tuple[Tree, Tree, tuple[jax.Array, ...]]:
        """B: the input's gradient, the vectors' gradients (None for matrices), and the stash."""
        known, vectors = self._known(residuals, dy, state), self._grads(in_b=True)
        outputs = [*self._x.gradients, *vectors, *self._stashed]
        made = self._run(params, microbatch, known, outputs)
        dx, rest = self._x.tree_of(made), made[len(self._x.values) :]
        return dx, self._gradients(rest, in_b=True), tuple(rest[len(vectors) :])

    def backward_weight(
        self,
        params: Tree,
        microbatch: Tree,
        for_w: tuple[jax.Array, ...],
        stash: tuple[jax.Array, ...],
    ) -> Tree:
        """W: the matrices' gradients (None for vectors)."""
        known = dict(zip(self._kept.for_w, for_w)) | dict(zip(self._stashed, stash))
        grads = self._run(params, microbatch, known, self._grads(in_b=False))
        return self._gradients(grads, in_b=False)

    def backward(
        self, params: Tree, microbatch: Tree, residuals: Residuals, dy: Tree, state: Tree = None
    ) -> tuple[Tree, Tree]:
        """BW: the input's gradient and every parameter's; B, then W.

        Behind the barrier the stash is made once: without it XLA on CPU makes it for B's matrix
        products and again for W's, and BW takes 5 % longer. What B has gathered W need not gather.
        """
        known, vectors = self._known(residuals, dy, state), self._grads(in_b=True)
        handed = (*self._stashed, *self._gathered)
        made = self._run(params, microbatch, known, [*self._x.gradients, *vectors, *handed])
        dx, rest = self._x.tree_of(made), made[len(self._x.values) :]
        vectors, rest = self._gradients(rest, in_b=True), rest[len(vectors) :]
        known |= dict(zip(handed, lax.optimization_barrier(rest)))
        matrices = self._run(params, microbatch, known, self._grads(in_b=False))
        matrices = self._gradients(matrices, in_b=False)
        either = lambda vector, matrix: matrix if vector is None else vector  # noqa: E731
        return dx, jax.tree.map(either, vectors, matrices, is_leaf=lambda leaf: leaf is None)

    @property
    def _params(self) -> Any:
        return self._arguments.children()[0]

    def _grads(self, *, in_b: bool) -> list[Any]:
        every = self._closed.jaxpr.outvars[-len(self._in_b) :] if self._in_b else []
        return [g for g, b in zip(every, self._in_b) if b is in_b]

    def _gradients(self, values: Iterable[jax.Array], *, in_b: bool) -> Tree:
        """The parameters' tree with `values` at the leaves of one kind and None at the others."""
        values = iter(values)
        return jax.tree.unflatten(
            self._params, [next(values) if b is in_b else None for b in self._in_b]
        )

    def _known(self, residuals: Residuals, dy: Tree, state: Tree) -> dict[Var, Any]:
        kept = (*self._kept.for_b, *self._kept.for_w)
        known = dict(zip(self._y.state, jax.tree.leaves(state)))
        known |= dict(zip(kept, (*residuals.for_b, *residuals.for_w)))
        return known | dict(zip(self._y.gradients, jax.tree.leaves(dy)))

    def _run(
        self, params: Tree, microbatch: Tree, known: dict[Var, Any], outputs: list[Any]
    ) -> list[Any]:
        jaxpr = self._closed.jaxpr
        given = dict(zip(jaxpr.constvars, self._closed.consts))
        given |= dict(zip(jaxpr.invars, jax.tree.leaves((params, microbatch))))
        return run_slice(jaxpr, given | known, outputs)


@dataclass(frozen=True)
class _Variables:
    """x and dx, or y and dy: trees of one form, whose leaves after the first are the state."""

    form: Any  # treedef
    values: tuple[Any, ...]
    gradients: tuple[Any, ...]

    @property
    def state(self) -> tuple[Any, ...]:
        return self.values[1:]

    def values_of(self, tree: Tree) -> dict[Var, Any]:
        return dict(zip(self.values, jax.tree.leaves(tree)))

    def tree_of(self, leaves: list[Any]) -> Tree:
        return jax.tree.unflatten(self.form, leaves[: len(self.values)])


def split_layer(
    layer: Layer, params: Tree, x: Any, microbatch: Tree, policy: Policy = POLICIES["none"]
) -> LayerSplit:
    """Trace a layer at the given shapes and cut it.

    `params`, `x` and `microbatch` may be arrays or `jax.ShapeDtypeStruct`; x is an array, or with
    what slices of a sequence share `(x, state)`, and so is what the layer returns. Inside
    `shard_map` the layer may use collectives over bound axes. An inner loop, or a layer already
    wrapped in `jax.checkpoint`, is one opaque equation: B then makes the gradients of its weights.

    Raises `ValueError` where B would need the state as it was before this slice, or W any of it.
    """
    params, x, microbatch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x, microbatch)
    )

    def both(params: Tree, microbatch: Tree, x: Tree, dy: Tree) -> Any:
        y, pull = jax.vjp(lambda params, x: layer(params, x, microbatch), params, x)
        dparams, dx = pull(dy)
        return y, dx, dparams

    y = jax.eval_shape(layer, params, x, microbatch)
    closed = trace_flat(both, params, microbatch, x, y)
    in_b = tuple(len(leaf.shape) < 2 for leaf in jax.tree.leaves(params))
    (x_form, y_form), jaxpr = map(jax.tree.structure, (x, y)), closed.jaxpr
    n_x, n_y = x_form.num_leaves, y_form.num_leaves
    inputs, outputs = jaxpr.invars[-n_x - n_y :], jaxpr.outvars
    x_variables = _Variables(x_form, tuple(inputs[:n_x]), tuple(outputs[n_y : n_y + n_x]))
    y_variables = _Variables(y_form, tuple(outputs[:n_y]), tuple(inputs[n_x:]))
    kept, stashed, gathered = _cut(jaxpr, x_variables, y_variables, in_b, policy)
    return LayerSplit(
        residuals=Residuals(_shapes(kept.for_b), _shapes(kept.for_w)),
        stash=_shapes(stashed),
        _closed=closed,
        _arguments=jax.tree.structure((params, microbatch)),
        _x=x_variables,
        _y=y_variables,
        _in_b=in_b,
        _kept=kept,
        _stashed=stashed,
        _gathered=gathered,
    )


def _cut(
    jaxpr: Jaxpr, x: _Variables, y: _Variables, in_b: tuple[bool, ...], policy: Policy
) -> tuple[Residuals, tuple[Var, ...], tuple[Var, ...]]:
    """Which values cross from F to B or W and from B to W; and what both B and W gather."""
    free = {*jaxpr.constvars, *jaxpr.invars, *y.state} - {*x.values, *y.gradients}
    on_dy = dependents(jaxpr, y.gradients)
    on_x = dependents(jaxpr, x.values) - on_dy - free
    grads = jaxpr.outvars[-len(in_b) :] if in_b else []
    b_outputs = [*x.gradients, *(grad for grad, b in zip(grads, in_b) if b)]
    w_outputs = [grad for grad, b in zip(grads, in_b) if not b]

    layout = {var for eqn in jaxpr.eqns if _only_rearranges(eqn) for var in eqn.outvars}
    saved = {x.values[0]} | {
        var
        for eqn in jaxpr.eqns
        for var in eqn.outvars
        if var in on_x - layout and policy(eqn.primitive, *_avals(eqn), **eqn.params) is True
    }
    # Of what may be stored, all that B and W read, but what B makes again of the rest.
    backward, made_before = [*b_outputs, *w_outputs], free | saved | {*y.gradients}
    saved &= {*reads(equations_to(jaxpr, backward, made_before), backward)}
    saved -= _repeated(jaxpr, saved, on_x)
    # W stops at what B has made and at forward values that B will compute again for it.
    by_b = {var for eqn in equations_to(jaxpr, b_outputs, free) for var in eqn.outvars}
    handed = ((by_b & on_dy) | (on_x - saved) | {*y.gradients}) - layout
    in_w = equations_to(jaxpr, w_outputs, free | saved | handed)
    from_b_or_f = reads(in_w, w_outputs)
    stash = [var for var in from_b_or_f if var in handed]
    for_w = [var for var in from_b_or_f if var in saved]
    b_and_stash = [*b_outputs, *stash]
    in_whole_b = equations_to(jaxpr, b_and_stash, free | saved | {*y.gradients})
    from_f = reads(in_whole_b, b_and_stash)
    if {*from_f} & {*x.state} or {*from_b_or_f} & {*x.state, *y.state}:
        raise ValueError(
            "the gradient of a layer of slices may read the state that the layer returns, in B, "
            "but not the state that it is given."
        )
    for_b = [var for var in from_f if var in saved and var not in for_w]
    made = {var for eqn in in_whole_b for var in eqn.outvars}
    gathers = (eqn.outvars[0] for eqn in in_w if eqn.primitive.name == "all_gather")
    gathered = tuple(var for var in gathers if var in made)
    return Residuals(tuple(for_b), tuple(for_w)), tuple(stash), gathered


def _repeated(jaxpr: Jaxpr, saved: set[Var], on_x: set[Var]) -> set[Var]:
    """What elementwise equations make of the rest of `saved`, and of what does not depend on x.

    B makes it again for less than it costs to store: the sigmoid of a stored gate, probabilities
    beside their exponentials, the input of a matrix that is a norm's output.
    """
    cheap = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _ELEMENTWISE and on_x.issuperset(eqn.outvars)
    ]
    left = set(saved)
    for var in [var for eqn in reversed(cheap) for var in eqn.outvars if var in saved]:
        made = left - {var}
        for eqn in cheap:
            if made.issuperset(on_x.intersection(variables_in(eqn))):
                made.update(eqn.outvars)
        if var in made:
            left.remove(var)
    return saved - left


def _only_rearranges(eqn: JaxprEqn) -> bool:
    """Whether the equation moves or casts one operand and makes it no smaller."""
    if eqn.primitive.name not in _LAYOUT or len(eqn.invars) != 1:
        return False
    return _bytes(eqn.outvars[0].aval) >= _bytes(eqn.invars[0].aval)


def _bytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize


def _avals(eqn: JaxprEqn) -> list[Any]:
    return [var.aval for var in eqn.invars]


def _shapes(variables: Iterable[Var]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables)
