"""Run the equations of a flat jaxpr that some values need.

jax begins a `lax.scan` with an array of zeros for every result that it stacks. XLA on GPU merges
the zeros of equal shape of all loops, and copies them for each of them long before the loop starts,
since the copies wait for nothing: with recurrences in several layers the zeros of two layers' loops
are live while neither runs (1.3 of 18.8 GiB for a stage of four layers of Qwen3-Next-80B-A3B). Here
the zeros of a loop wait for what the loop reads.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun, primitives

from jaxpipe.core.contract import Tree
from jaxpipe.core.split.jaxpr import bind, equations_to, read, shape_of


def run_slice(
    jaxpr: Jaxpr,
    known: dict[Var, Any],
    outputs: Tree,
    effects: Collection[JaxprEqn] = (),
) -> Tree:
    """Return the values of `outputs`, running only the equations that they need.

    Args:
      jaxpr: a flat jaxpr.
      known: values of variables that are given.
      outputs: a tree of variables or literals to compute.
      effects: equations that are run too, even if no equation reads their outputs.
    """
    values = dict(known)
    for eqn in equations_to(jaxpr, jax.tree.leaves(outputs), known, effects):
        args = [read(values, var) for var in eqn.invars]
        if eqn.primitive is primitives.scan_p:
            values.update(zip(eqn.outvars, _run_scan(eqn, args)))
        elif eqn.primitive is primitives.remat_p:
            body = _rerun(eqn.params["jaxpr"])
            bind(eqn.replace(params=eqn.params | {"jaxpr": body}), values)
        else:
            bind(eqn, values)
    return jax.tree.map(lambda var: read(values, var), outputs)


def _rerun(body: Jaxpr) -> Jaxpr:
    """Return the jaxpr of `run_slice` for all outputs of the body of a `jax.checkpoint`."""

    def run(*args: Any) -> Any:
        return run_slice(body, dict(zip(body.invars, args)), body.outvars)

    return jax.make_jaxpr(run)(*map(shape_of, body.invars)).jaxpr


def _run_scan(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """Return the results of a `scan`, stacked into arrays that wait for its arguments."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    outer, inner = map(shape_of, eqn.outvars), map(shape_of, body.jaxpr.outvars)
    carries = [before == after for before, after in zip(outer, inner)].count(True)
    stacked = [*map(shape_of, eqn.outvars[carries:])]
    if not stacked:
        return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    pairs = zip(eqn.invars, body.jaxpr.invars)
    xs_begin = [shape_of(var).shape == shape_of(one).shape for var, one in pairs].count(True)
    args, zeros = lax.optimization_barrier((args, [jnp.zeros((), one.dtype) for one in stacked]))
    whole = [jnp.broadcast_to(zero, one.shape) for zero, one in zip(zeros, stacked)]
    consts, init = args[: xs_begin - carries], args[xs_begin - carries : xs_begin]

    def step(carry: tuple[Any, Any], of_step: tuple[Any, Any]) -> tuple[Any, None]:
        (before, whole), (number, xs) = carry, of_step
        results = jaxpr_as_fun(body)(*consts, *before, *xs)
        whole = [
            lax.dynamic_update_index_in_dim(into, one, number, 0)
            for into, one in zip(whole, results[carries:])
        ]
        return (results[:carries], whole), None

    given, how = (jnp.arange(length), args[xs_begin:]), ("reverse", "unroll")
    options = {name: eqn.params[name] for name in how}
    (after, whole), _ = lax.scan(step, (init, whole), given, length, **options)
    return [*after, *whole]
