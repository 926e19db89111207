"""Flat jaxprs: inline calls, find dependencies, and run only the equations that are needed."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, primitives

from jaxpipe.core.contract import Tree
from jaxpipe.core.jax_internals import define_primitive

# Calls that are inlined; others (loops, jax.checkpoint, shard_map) stay one opaque equation.
_INLINED = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "eval_jaxpr",  # the forward pass of a jax.checkpoint in a derivative, in jax 0.12
}  # fmt: skip
_SUMS = {primitives.reduce_sum_p, primitives.scatter_add_p, primitives.cumsum_p}
_RESHAPES = {primitives.reshape_p, primitives.squeeze_p}
_FLOAT32 = jnp.dtype("float32")
_WITH_BODIES = {primitives.cond_p, primitives.remat_p, primitives.scan_p, primitives.while_p}


# A concatenation of forward values that a split stores apart (`crossing.py`).
JOIN = "join"


def _joined(one: Any, other: Any, dimension: int) -> list[jax.ShapeDtypeStruct]:
    shape = list(one.shape)
    shape[dimension] += other.shape[dimension]
    return [jax.ShapeDtypeStruct(tuple(shape), one.dtype)]


_JOIN = define_primitive(
    JOIN, _joined, lambda one, other, dimension: [lax.concatenate([one, other], dimension)]
)
_SUM_OF_TWO = define_primitive(
    "sum_of_two", lambda one, other: [one], lambda one, other: [one + other]
)


def sum_of_two(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the sum of two arrays of one shape and dtype, of which `trace_flat` makes one sum."""
    return _SUM_OF_TWO.bind(one, other)[0]


def trace_flat(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Return the jaxpr of `function` at the shapes of `args`, with every call inlined.

    A transposed matmul `transpose(a @ b)`, as JAX writes a weight's gradient, is replaced by the
    matmul with swapped operands, which needs no transpose. XLA on CPU turns the former into a
    matmul of two transposed operands, for which it has no fast kernel: it takes 1.35 times as long.

    Sums of 16-bit floats (`reduce_sum`, `scatter-add`, `cumsum`) are computed in float32 and
    rounded once, also in the bodies of loops; `unrounded` returns the float32 result. The gradient
    of a broadcast or of a look-up is such a sum over tokens, and JAX writes it in the operand's
    dtype: a bfloat16 sum of n equal terms stops growing at 256 of them.

    A `sum_of_two` of 16-bit floats is computed in float32 and rounded once, and that of two matmuls
    is one matmul of their concatenated operands.
    """
    closed = jax.make_jaxpr(function)(*args)
    # The second pass finds transposed matmuls whose transpose is outside the call with the matmul.
    return _rewritten(_rewritten(closed))


class Labelled(NamedTuple):
    """A flat jaxpr whose variables are found by name.

    Attributes:
      closed: the jaxpr.
      inputs, outputs: the arguments and the result of the traced function, with the variable (or
        literal) of every array in its place.
    """

    closed: ClosedJaxpr
    inputs: Tree
    outputs: Tree


def trace_labelled(function: Callable[..., Tree], *args: Tree) -> Labelled:
    """Return `trace_flat` with the trees of variables of the arguments and the result."""
    forms = []

    def flat(*args: Tree) -> list[Any]:
        leaves, form = jax.tree.flatten(function(*args))
        forms.append(form)
        return leaves

    closed = trace_flat(flat, *args)
    inputs = jax.tree.unflatten(jax.tree.structure(args), closed.jaxpr.invars)
    return Labelled(closed, inputs, jax.tree.unflatten(forms[0], closed.jaxpr.outvars))


def unrounded(closed: ClosedJaxpr, outputs: Tree) -> tuple[ClosedJaxpr, Tree]:
    """Return a jaxpr, and a tree of its variables in place of `outputs`, with nothing rounded last.

    An output that is only a rounded wider float is replaced by that float, and a matmul of 16-bit
    floats that only makes an output by one with a float32 result.
    """
    jaxpr = closed.jaxpr
    wanted = {var for var in jax.tree.leaves(outputs) if isinstance(var, Var)}
    wanted_only = wanted.difference(reads(jaxpr.eqns, ()))
    wider: dict[Var, Var | Literal] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if wanted.intersection(eqn.outvars) and _rounds(eqn):
            wider[eqn.outvars[0]] = eqn.invars[0]
        elif wanted_only.intersection(eqn.outvars) and _makes_narrow_product(eqn):
            (var,) = eqn.outvars
            wider[var] = wide = Var(var.aval.update(dtype=_FLOAT32))
            params = eqn.params | {"preferred_element_type": _FLOAT32}
            eqn = eqn.replace(outvars=[wide], params=params)
        eqns.append(eqn)

    def widen(var: Any) -> Any:
        return wider.get(var, var) if isinstance(var, Var) else var

    jaxpr = jaxpr.replace(eqns=eqns, outvars=[widen(var) for var in jaxpr.outvars])
    return closed.replace(jaxpr=jaxpr), jax.tree.map(widen, outputs)


def _makes_narrow_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.dot_general_p and _is_narrow(eqn.outvars[0].aval)


def _rounds(eqn: JaxprEqn) -> bool:
    if eqn.primitive is not primitives.convert_element_type_p:
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return (
        _is_narrow(after) and jnp.issubdtype(before.dtype, jnp.floating) and not _is_narrow(before)
    )


def equations_to(
    jaxpr: Jaxpr,
    outputs: Iterable[Any],
    known: Collection[Var],
    effects: Collection[JaxprEqn] = (),
) -> list[JaxprEqn]:
    """Return, in order, the equations that `outputs` and `effects` need, given `known`."""
    wanted = {var for var in outputs if isinstance(var, Var) and var not in known}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars) or any(eqn is one for one in effects):
            equations.append(eqn)
            wanted.update(var for var in variables_in(eqn) if var not in known)
    return equations[::-1]


def names_axis(effect: Any) -> bool:
    """Whether an effect is that of a collective, which names a mesh axis; no side effect is."""
    return type(effect).__name__ == "NamedAxisEffect"


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether the equation has a side effect, as `jax.debug.print` does."""
    return not all(map(names_axis, eqn.effects))


def reads(equations: Iterable[JaxprEqn], outputs: Iterable[Any]) -> list[Var]:
    """Return the operands of the equations, then the outputs; every variable once."""
    every = [var for eqn in equations for var in variables_in(eqn)]
    every += [var for var in outputs if isinstance(var, Var)]
    return list(dict.fromkeys(every))


def dependents(
    jaxpr: Jaxpr, sources: Iterable[Var], known: Collection[Var] = frozenset()
) -> set[Var]:
    """Return `sources` and every variable computed from them, other than through `known`."""
    reached = set(sources)
    for eqn in jaxpr.eqns:
        if reached.intersection(variables_in(eqn)):
            reached.update(var for var in eqn.outvars if var not in known)
    return reached


def variables_in(eqn: JaxprEqn) -> list[Var]:
    """Return the operands of an equation that are variables, not literals."""
    return [var for var in eqn.invars if isinstance(var, Var)]


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a variable or literal, which holds an array."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def evaluate(closed: ClosedJaxpr, args: Iterable[Any]) -> list[Any]:
    """Return the outputs of a jaxpr, with the replacements of `trace_flat`."""
    return _evaluate(closed.jaxpr, closed.consts, args)


def _rewritten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr with its calls inlined and the replacements of `trace_flat`."""
    shapes = map(shape_of, closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: _evaluate(closed.jaxpr, closed.consts, args))(*shapes)


def _evaluate(jaxpr: Jaxpr, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    products = {var: eqn for var, eqn in makers.items() if eqn.primitive is lax.dot_general_p}
    sums: dict[Var, jax.Array] = {}  # float32 sums, by the variable of the rounded sum
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.transpose_p and eqn.invars[0] in products:
            eqn = _swapped(products[eqn.invars[0]], eqn) or eqn
            makers[eqn.outvars[0]] = eqn
        if eqn.primitive in _WITH_BODIES:
            bodies = {name: _with_wide_sums(param) for name, param in eqn.params.items()}
            eqn = eqn.replace(params=bodies)
        if eqn.primitive is _SUM_OF_TWO:
            total = _sum_terms(eqn, makers, values, sums)
            values[eqn.outvars[0]] = total.astype(shape_of(eqn.outvars[0]).dtype)
        elif (eqn.primitive in _SUMS and _is_narrow(eqn.outvars[0].aval)) or (
            eqn.primitive in _RESHAPES and not sums.keys().isdisjoint(variables_in(eqn))
        ):
            (result,) = eqn.outvars
            sums[result] = _in_float32(eqn, values | sums)
            values[result] = sums[result].astype(shape_of(result).dtype)
        else:
            bind(eqn, values)
    return [read(values, var) for var in jaxpr.outvars]


def _sum_terms(
    eqn: JaxprEqn, makers: dict[Var, JaxprEqn], values: dict[Var, Any], sums: dict[Var, jax.Array]
) -> jax.Array:
    """Evaluate a `sum_of_two`, in float32 if its terms are 16-bit floats.

    Of terms from calls that are inlined the next pass of `trace_flat` finds the matmuls.
    """
    terms = [read(values, var) for var in eqn.invars]
    known = [makers[var] for var in variables_in(eqn) if var in makers]
    if any(maker.primitive.name in _INLINED for maker in known):
        return sum_of_two(*terms)
    wide = _FLOAT32 if _is_narrow(terms[0]) else terms[0].dtype
    products = [maker for maker in known if maker.primitive is lax.dot_general_p]
    if len(products) < 2 or products[0].params != products[1].params:
        first, second = (read(values | sums, var).astype(wide) for var in eqn.invars)
        return first + second
    one, other = products
    numbers = one.params["dimension_numbers"]
    sides = zip(one.invars, other.invars, (dims[0] for dims in numbers[0]))
    left, right = (
        _JOIN.bind(read(values, a), read(values, b), dimension=dim)[0] for a, b, dim in sides
    )
    params = one.params | {"preferred_element_type": wide}
    return lax.dot_general_p.bind(left, right, **params)


def _is_narrow(like: Any) -> bool:
    return jnp.issubdtype(like.dtype, jnp.floating) and jnp.finfo(like.dtype).bits < 32


def _in_float32(eqn: JaxprEqn, values: dict[Var, Any]) -> jax.Array:
    """Evaluate an equation with one output on operands widened to float32."""
    operands = (jnp.asarray(read(values, var)) for var in eqn.invars)
    wide = [x.astype(jnp.float32) if _is_narrow(x) else x for x in operands]
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive is primitives.scatter_add_p:
        params = {name: param for name, param in params.items() if not name.startswith("update_")}
        operand, indices, updates = wide
        return lax.scatter_add(operand, indices, updates, **params)
    return eqn.primitive.bind(*wide, **params)


def _with_wide_sums(param: Any) -> Any:
    """Return jaxprs of loop bodies and branches with float32 sums; other params unchanged."""
    if type(param) is tuple:
        return tuple(map(_with_wide_sums, param))
    if not isinstance(param, (Jaxpr, ClosedJaxpr)):
        return param
    if isinstance(param, ClosedJaxpr):
        return _rewritten(param)
    return _rewritten(ClosedJaxpr(param, ())).jaxpr


def _swapped(product: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn | None:
    """Return `transpose(a @ b)` as one product with swapped operands; None where not equal."""
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    batch, whole = len(left_batch), shape_of(product.outvars[0]).ndim
    free = shape_of(product.invars[0]).ndim - len(left)  # dims of the batch, then free ones of a
    swapped = (*range(batch), *range(free, whole), *range(batch, free))
    sharding = product.params["out_sharding"]  # names no axes inside a shard_map
    named = sharding is not None and any(sharding.spec)
    if named or transpose.params["permutation"] != swapped:
        return None
    precision = product.params["precision"]
    precision = precision[::-1] if isinstance(precision, tuple) else precision
    changed = {
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision,
        "out_sharding": None,
    }
    return product.replace(
        invars=product.invars[::-1],
        outvars=transpose.outvars,
        params=product.params | changed,
    )


def bind(eqn: JaxprEqn, values: dict[Var, Any]) -> None:
    """Run one equation, inlining it if it is a call, and store its outputs in `values`."""
    args = [read(values, var) for var in eqn.invars]
    if eqn.primitive.name in _INLINED:
        body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        outs = _evaluate(body.jaxpr, body.consts, args)
    else:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        outs = outs if eqn.primitive.multiple_results else [outs]
    values.update(zip(eqn.outvars, outs))


def read(values: dict[Var, Any], var: Any) -> Any:
    """Return the value of a variable or a literal."""
    return var.val if isinstance(var, Literal) else values[var]
