"""Find which values cross from F to B and W (residuals), and from B to W (the W stash).

Residuals are the forward values that B or W reads *and that depend on x*. Values that depend only
on parameters, constants, the microbatch's rows or the state that the layer returns are recomputed,
never stored, and so are values that elementwise equations compute from other residuals. The W stash
are the values of B that W reads. Rematerialisation is the same split with fewer residuals: a policy
says which forward values may be stored, and B recomputes the others. Values with a name in `keep`
are stored whatever the policy says. If R recomputes ahead of B, F stores for R what its policy
allows, and R stores for B and W what a second policy allows.

Effects (`jax.debug.print`, callbacks) happen once: those of the forward in F, those that depend on
the gradient in B. Outputs of an equation with an effect are stored as if named in `keep`.
"""

from collections.abc import Callable
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpipe.core.contract.layer import POINT, PRODUCT
from jaxpipe.core.split.halves import half_named
from jaxpipe.core.split.jaxpr import (
    JOIN,
    dependents,
    equations_to,
    has_effects,
    reads,
    variables_in,
)
from jaxpipe.core.split.ports import Ports

Policy = Callable[..., bool]  # (primitive, *avals, **params) -> may this value be stored?

# Equations that only rearrange, widen or narrow an operand are cheaper to repeat than to store.
# Values all-gathered over tp are stored as shards and gathered again (Korthikanti et al. 2022,
# 4.2.2), and the rows that experts take are gathered again from the tokens.
_LAYOUT = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "gather",
    "neg", "reshape", "squeeze", "transpose",
}  # fmt: skip


def _save_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Store the outputs of weight matmuls, all-reduced or reduce-scattered, and of attention."""
    prefixes = "dot_product_attention", "fp8_ragged_dot", "psum", "ragged_dot", "reduce_scatter"
    name = params["name"] if primitive.name == "name" else primitive.name
    if name.startswith(prefixes) or name == PRODUCT:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)


# Elementwise or data-moving equations without communication.
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


RECOMPUTED = POLICIES["selective"]  # what R stores: to compute the rest again costs B little


class Residuals(NamedTuple):
    """Forward values that the backward reads: `for_b` live until B, `for_w` until W.

    If R recomputes these, F stores `for_r`, what R computes them from; else that is None.
    """

    for_b: tuple[Any, ...]
    for_w: tuple[Any, ...]
    for_r: tuple[Any, ...] | None = None

    @property
    def of_f(self) -> "Residuals":
        """What F writes."""
        return self if self.for_r is None else Residuals((), (), self.for_r)


class Crossing(NamedTuple):
    """The values that cross between F, B and W.

    Attributes:
      residuals: from F (or R) to B and W, and from F to R.
      stash: from B to W.
      gathered: all-gather outputs that both B and W need; BW computes them once.
      effects_in_f, effects_in_b: the equations that F and B run for their effects.
    """

    residuals: Residuals
    stash: tuple[Var, ...]
    gathered: tuple[Var, ...]
    effects_in_f: tuple[JaxprEqn, ...]
    effects_in_b: tuple[JaxprEqn, ...]


def find_crossing(
    jaxpr: Jaxpr,
    ports: Ports,
    policy: Policy,
    keep: tuple[str, ...],
    recomputed: Policy | None = None,
) -> Crossing:
    """Find the values that cross; F stores values named in `keep` if B or W reads them.

    `recomputed` is the policy of R, which says what it may store; None: there is no R.

    Raises `ValueError` where B or W would need the state from before this slice, and may not store
    it.
    """
    state, next_state = jax.tree.leaves(ports.state), ports.left_state
    after = {ports.dy.value, *ports.dy.state}
    free = {*jaxpr.constvars, *jaxpr.invars, *next_state} - {ports.x, *state, *after}
    on_dy = dependents(jaxpr, after.union(jax.tree.leaves(ports.dy.losses)))
    in_f, in_b = _effects(jaxpr, on_dy)
    once = {var for eqn in in_f for var in eqn.outvars}
    on_x = dependents(jaxpr, {ports.x, *state, *once}, next_state) - on_dy - free
    b_outputs = [*ports.made_by_b, *(var for eqn in in_b for var in variables_in(eqn))]
    w_outputs = jax.tree.leaves(ports.gradients_of_w)

    layout = _rearranged(jaxpr)

    def storable(policy: Policy) -> set[Var]:
        return ports.stored_inputs | {
            var
            for eqn in jaxpr.eqns
            for var in eqn.outvars
            if var in once
            or (var in on_x - layout and (_is_kept(eqn, keep) or _may_store(eqn, policy)))
        }

    saved = storable(recomputed or policy)
    # Store the allowed values that B and W read, except those that B can cheaply recompute.
    backward, computed = [*b_outputs, *w_outputs], free | saved | after
    saved &= {*reads(equations_to(jaxpr, backward, computed), backward)}
    saved -= _repeated(jaxpr, saved, on_x)
    # W starts from values that B has computed, and from forward values that B recomputes for it.
    by_b = {var for eqn in equations_to(jaxpr, b_outputs, free, in_b) for var in eqn.outvars}
    handed = ((by_b & on_dy) | (on_x - saved) | after) - layout
    in_w = equations_to(jaxpr, w_outputs, free | saved | handed)
    from_b_or_f = reads(in_w, w_outputs)
    stash = [var for var in from_b_or_f if var in handed]
    for_w = [var for var in from_b_or_f if var in saved]
    b_and_stash = [*b_outputs, *stash]
    in_b_and_stash = equations_to(jaxpr, b_and_stash, free | saved | after)
    from_f = reads(in_b_and_stash, b_and_stash)
    unknown = {*state} - saved
    if unknown.intersection(from_f) or unknown.union(next_state).intersection(from_b_or_f):
        raise ValueError(
            "the gradient of a layer of slices may read the state that the layer returns, in B, "
            "but not the state that it is given."
        )
    for_b = [var for var in from_f if var in saved and var not in for_w]
    in_backward = {var for eqn in in_b_and_stash for var in eqn.outvars}
    gathers = (eqn.outvars[0] for eqn in in_w if eqn.primitive.name == "all_gather")
    gathered = tuple(var for var in gathers if var in in_backward)
    for_r = None
    if recomputed is not None:
        wanted, stored = [*for_b, *for_w], storable(policy)
        read_by_r = reads(equations_to(jaxpr, wanted, free | stored), wanted)
        for_r = tuple(var for var in read_by_r if var in stored)
    residuals = Residuals(tuple(for_b), tuple(for_w), for_r)
    return Crossing(residuals, tuple(stash), gathered, in_f, in_b)


def _effects(jaxpr: Jaxpr, on_dy: set[Var]) -> tuple[tuple[JaxprEqn, ...], tuple[JaxprEqn, ...]]:
    """Return the equations with effects that F runs, and those that B runs, which depend on dy."""
    effects = [(eqn, on_dy.isdisjoint(variables_in(eqn))) for eqn in jaxpr.eqns if has_effects(eqn)]
    in_f = tuple(eqn for eqn, is_forward in effects if is_forward)
    return in_f, tuple(eqn for eqn, is_forward in effects if not is_forward)


def find_gradients_of_state(jaxpr: Jaxpr, ports: Ports) -> frozenset[Var]:
    """Return the gradients of matrices whose last products read the state that the layer returns.

    Such a product, of keys' latents by the gradients at keys, say, is part of B: in W the state may
    be gone.
    """
    state, next_state = jax.tree.leaves(ports.state), ports.left_state
    on_dy = dependents(jaxpr, jax.tree.leaves((ports.dy.value, ports.dy.state, ports.dy.losses)))
    by_b = {var for eqn in equations_to(jaxpr, ports.made_by_b, ()) for var in eqn.outvars}
    known = dependents(jaxpr, {ports.x, *state}, next_state) - on_dy | by_b & on_dy
    wanted = jax.tree.leaves(ports.gradients_of_w)
    read = {var: reads(equations_to(jaxpr, [var], known), [var]) for var in wanted}
    return frozenset(var for var, of in read.items() if not {*next_state}.isdisjoint(of))


def _is_kept(eqn: JaxprEqn, keep: tuple[str, ...]) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] in keep


def _may_store(eqn: JaxprEqn, policy: Policy) -> bool:
    return policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params) is True


def _repeated(jaxpr: Jaxpr, saved: set[Var], on_x: set[Var]) -> set[Var]:
    """Return the `saved` values that elementwise equations can recompute from the others.

    The equations may also read values that do not depend on x. To recompute costs less than to
    store: the sigmoid of a stored gate, probabilities whose exponentials are stored, the input of a
    matmul that is a norm's output.
    """
    cheap = [
        eqn
        for eqn in jaxpr.eqns
        if (eqn.primitive.name in _ELEMENTWISE or half_named(eqn) is not None)
        and on_x.issuperset(eqn.outvars)
    ]
    remaining = set(saved)
    for var in [var for eqn in reversed(cheap) for var in eqn.outvars if var in saved]:
        derivable = remaining - {var}
        for eqn in cheap:
            if derivable.issuperset(on_x.intersection(variables_in(eqn))):
                derivable.update(eqn.outvars)
        if var in derivable:
            remaining.remove(var)
    return saved - remaining


def _rearranged(jaxpr: Jaxpr) -> set[Var]:
    """Return the values that are others in another form, and the halves of x and dy."""
    named = {eqn.invars[0] for eqn in jaxpr.eqns if half_named(eqn) is not None}
    halves = (eqn.outvars for eqn in jaxpr.eqns if eqn.primitive.name == "split")
    rearranged = (eqn.outvars for eqn in jaxpr.eqns if _only_rearranges(eqn))
    return {*chain(*rearranged), *(var for var in chain(*halves) if var in named)}


def _only_rearranges(eqn: JaxprEqn) -> bool:
    """Whether the equation only names an operand, or moves or casts it and makes it no smaller.

    The operand of a `gather` is its first.
    """
    name = eqn.primitive.name
    if name == "name":
        return eqn.params["name"].startswith(POINT)
    if name == JOIN:
        return True
    if name not in _LAYOUT or (len(eqn.invars) != 1 and name != "gather"):
        return False
    return _bytes(eqn.outvars[0].aval) >= _bytes(eqn.invars[0].aval)


def _bytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize
