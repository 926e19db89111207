"""Where a layer is cut: which values cross from F to B and W, and from B to W.

Residuals are the forward values that B or W reads *and that depend on x*; what depends only on
parameters, constants or the microbatch's own data is computed again, never stored, and so is what
elementwise equations make of other residuals. The stash is what W reads of B. Rematerialisation is
the same cut made elsewhere: a policy says which forward values may be stored, and B computes the
others again from those. Values with a name that must be kept are stored whatever the policy says.

Effects (`jax.debug.print`, callbacks) happen once: those of the forward in F, those that depend on
the gradient in B. What an equation with an effect returns is stored like a value that must be kept.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpipe.contract.layer import IN_FORWARD, IN_GRADIENT, PRODUCT
from jaxpipe.pipeline.jaxpr import dependents, equations_to, has_effects, reads, variables_in

Policy = Callable[..., bool]  # (primitive, *avals, **params) -> may this value be stored?

# Equations that only rearrange, widen or narrow an operand: cheaper to repeat than to store. What
# is gathered over tp is stored in parts too, and gathered again (Korthikanti et al. 2022, 4.2.2);
# so are the rows that a token's experts take.
_LAYOUT = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "gather",
    "neg", "reshape", "squeeze", "transpose",
}  # fmt: skip


def _save_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Store the outputs of weight matrices, summed over devices, and of fused attention."""
    stored = ("dot_product_attention", "psum", "ragged_dot", "reduce_scatter")
    name = params["name"] if primitive.name == "name" else primitive.name
    if name.startswith(stored) or name == PRODUCT:
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


class Ports(NamedTuple):
    """The variables of a layer's jaxpr, forward and backward, by what they are.

    Inputs: `x` and the `state` of slices before this one; `dy`, `dstate` and `dloss`, the gradients
    at the outputs. Outputs: `y`, `next_state`, `loss` and what else is made `beside` them; `dx` and
    `dstate_before`; what is left at variables that are `observed`; `gradients` of the parameters,
    of which `in_b` says whether B makes them. Those that a layer may lack are tuples.
    """

    x: Var
    state: tuple[Var, ...]
    dy: Var
    dstate: tuple[Var, ...]
    dloss: tuple[Var, ...]
    y: Any
    next_state: tuple[Any, ...]
    loss: tuple[Any, ...]
    beside: tuple[Any, ...]
    dx: Any
    dstate_before: tuple[Any, ...]
    observed: tuple[Any, ...]
    gradients: tuple[Any, ...]
    in_b: tuple[bool, ...]

    def gradients_of(self, *, b: bool) -> list[Any]:
        """The parameters' gradients that B makes, or that W does."""
        return [gradient for gradient, in_b in zip(self.gradients, self.in_b) if in_b is b]

    @property
    def made_by_b(self) -> list[Any]:
        """What B makes, in the order in which it does."""
        return [self.dx, *self.dstate_before, *self.observed, *self.gradients_of(b=True)]


class Residuals(NamedTuple):
    """Forward values kept for the backward: `for_b` until B, `for_w` until W."""

    for_b: tuple[Any, ...]
    for_w: tuple[Any, ...]


class Crossing(NamedTuple):
    """What crosses: residuals, the stash, and what both B and W gather of values in parts.

    `effects_in_f` and `effects_in_b` are the equations that F and B run for their effects.
    """

    residuals: Residuals
    stash: tuple[Var, ...]
    gathered: tuple[Var, ...]
    effects_in_f: tuple[JaxprEqn, ...]
    effects_in_b: tuple[JaxprEqn, ...]


def cut(jaxpr: Jaxpr, ports: Ports, policy: Policy, keep: tuple[str, ...]) -> Crossing:
    """Find what crosses; `keep` are names of values that F stores if B or W reads them.

    Raises `ValueError` where B would need the state as it was before this slice, or W any of it.
    """
    after = {ports.dy, *ports.dstate}
    free = {*jaxpr.constvars, *jaxpr.invars, *ports.next_state} - {ports.x, *ports.state, *after}
    on_dy = dependents(jaxpr, {*after, *ports.dloss})
    effects = [eqn for eqn in jaxpr.eqns if has_effects(eqn)]
    in_b = tuple(eqn for eqn in effects if not on_dy.isdisjoint(variables_in(eqn)))
    in_f = tuple(eqn for eqn in effects if on_dy.isdisjoint(variables_in(eqn)))
    once = {var for eqn in in_f for var in eqn.outvars}
    on_x = dependents(jaxpr, {ports.x, *ports.state, *once}) - on_dy - free
    b_outputs = [*ports.made_by_b, *(var for eqn in in_b for var in variables_in(eqn))]
    w_outputs = ports.gradients_of(b=False)

    layout = {var for eqn in jaxpr.eqns if _only_rearranges(eqn) for var in eqn.outvars}
    saved = {ports.x} | {
        var
        for eqn in jaxpr.eqns
        for var in eqn.outvars
        if var in once
        or (var in on_x - layout and (_is_kept(eqn, keep) or _may_store(eqn, policy)))
    }
    # Of what may be stored, all that B and W read, but what B makes again of the rest.
    backward, made_before = [*b_outputs, *w_outputs], free | saved | after
    saved &= {*reads(equations_to(jaxpr, backward, made_before), backward)}
    saved -= _repeated(jaxpr, saved, on_x)
    # W stops at what B has made and at forward values that B will compute again for it.
    by_b = {var for eqn in equations_to(jaxpr, b_outputs, free, in_b) for var in eqn.outvars}
    handed = ((by_b & on_dy) | (on_x - saved) | after) - layout
    in_w = equations_to(jaxpr, w_outputs, free | saved | handed)
    from_b_or_f = reads(in_w, w_outputs)
    stash = [var for var in from_b_or_f if var in handed]
    for_w = [var for var in from_b_or_f if var in saved]
    b_and_stash = [*b_outputs, *stash]
    in_whole_b = equations_to(jaxpr, b_and_stash, free | saved | after)
    from_f = reads(in_whole_b, b_and_stash)
    if {*from_f} & {*ports.state} or {*from_b_or_f} & {*ports.state, *ports.next_state}:
        raise ValueError(
            "the gradient of a layer of slices may read the state that the layer returns, in B, "
            "but not the state that it is given."
        )
    for_b = [var for var in from_f if var in saved and var not in for_w]
    made = {var for eqn in in_whole_b for var in eqn.outvars}
    gathers = (eqn.outvars[0] for eqn in in_w if eqn.primitive.name == "all_gather")
    gathered = tuple(var for var in gathers if var in made)
    residuals = Residuals(tuple(for_b), tuple(for_w))
    return Crossing(residuals, tuple(stash), gathered, in_f, in_b)


def _is_kept(eqn: JaxprEqn, keep: tuple[str, ...]) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] in keep


def _may_store(eqn: JaxprEqn, policy: Policy) -> bool:
    return policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params) is True


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
    """Whether the equation moves or casts an operand, a gather's first, and makes it no smaller.

    Or whether it only names it.
    """
    name = eqn.primitive.name
    if name == "name":
        return eqn.params["name"].startswith((IN_FORWARD, IN_GRADIENT))
    if name not in _LAYOUT or (len(eqn.invars) != 1 and name != "gather"):
        return False
    return _bytes(eqn.outvars[0].aval) >= _bytes(eqn.invars[0].aval)


def _bytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize
