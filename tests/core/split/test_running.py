"""Loops of a layer: the numbers of jax's own, without results that are stacked from zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe.core.split.jaxpr import trace_flat
from jaxpipe.core.split.running import run_slice

X = np.random.default_rng(0).normal(size=(6, 4))
FACTOR = np.random.default_rng(1).normal(size=(4, 4))


def loop(x, factor, **how):
    def step(carry, row):
        carry = jnp.tanh(carry @ factor + row)
        return carry, (carry, carry.sum())

    return lax.scan(step, jnp.zeros(4), x, **how)


def gradients(x, factor):
    """A loop that its gradient runs again, and the loop of the gradient."""
    run = jax.checkpoint(lambda *given: jnp.sin(loop(*given)[1][0]))
    y, pull = jax.vjp(run, x, factor)
    return y, pull(y)


CASES = {
    "loop": loop,
    "backwards": lambda x, factor: loop(x, factor, reverse=True),
    "unrolled": lambda x, factor: loop(x, factor, unroll=4),
    "without rows": lambda x, factor: lax.scan(lambda y, _: (y @ factor, y), x, length=3),
    "gradients": gradients,
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_stacks_into_what_it_is_given(case):
    with jax.enable_x64(True):
        closed = trace_flat(CASES[case], X, FACTOR)

        def run(*args):
            known = dict(zip(closed.jaxpr.invars, args))
            return run_slice(closed.jaxpr, known, closed.jaxpr.outvars)

        want = jax.tree.leaves(jax.jit(CASES[case])(X, FACTOR))
        for one, other in zip(jax.jit(run)(X, FACTOR), want, strict=True):
            np.testing.assert_array_equal(one, other)
        loops = [*scans(jax.make_jaxpr(run)(X, FACTOR).jaxpr)]
        assert len(loops) == (3 if case == "gradients" else 1)
        for makers, eqn in loops:
            body = eqn.params["jaxpr"].jaxpr
            assert [var.aval.shape for var in eqn.outvars] == [v.aval.shape for v in body.outvars]
            given = [makers[id(var)] for var in eqn.invars if id(var) in makers]
            zeros = [one for one in given if one.primitive is lax.broadcast_in_dim_p]
            waiting = [makers.get(id(one.invars[0])) for one in zeros]
            assert any(one and one.primitive is lax.optimization_barrier_p for one in waiting)


def scans(jaxpr):
    """Yield what makes each variable, by `id`, and every loop that reads some of them."""
    makers = {id(var): eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield makers, eqn
            continue
        for param in eqn.params.values():
            body = getattr(param, "jaxpr", param)
            if hasattr(body, "eqns"):
                yield from scans(body)
