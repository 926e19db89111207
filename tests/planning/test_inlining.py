"""Calls are inlined alike for kernels and for bytes; a loop moves what its iterations move."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.planning.cost.inlining import inlined
from jaxpipe.planning.cost.liveness import working_set
from jaxpipe.planning.cost.operations import operations_of

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)


@jax.custom_vjp
def custom(x, w):
    return layer(x, w)


custom.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda saved, dy: (dy, dy))


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda _: custom])
def test_a_call_costs_what_its_body_costs(call):
    plain, called = (
        jax.make_jaxpr(lambda x, w, f=f: f(f(x, w), w) @ w)(SQUARE, SQUARE).jaxpr
        for f in (layer, call(layer))
    )
    assert len(called.eqns) < len(plain.eqns)
    names = [[one.name for one in inlined(jaxpr)[0]] for jaxpr in (called, plain)]
    assert names[0] == names[1]
    assert working_set(called) == working_set(plain)
    assert operations_of(called) == operations_of(plain)


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_a_result_of_a_call_is_a_result(call):
    """It is written, and where it is a product that is added to a sum, the sum is read."""

    def both(x, w):
        return jnp.sin(x), x @ w

    plain, called = (
        jax.make_jaxpr(lambda x, w, f=f: f(x * 2, w))(SQUARE, SQUARE).jaxpr
        for f in (both, call(both))
    )
    assert working_set(called) == working_set(plain)
    assert operations_of(called).moved > 0
    for adds in (False, True):
        assert operations_of(called, adds=adds) == operations_of(plain, adds=adds)


def test_a_sum_of_two_numbers_is_no_call():
    """A scatter has a jaxpr that adds an element: it is a kernel, which reads and writes rows."""
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32)

    def scatter(table, rows):
        return table.at[jnp.arange(8) * 2].add(rows)

    traced = jax.make_jaxpr(scatter)(SQUARE, rows).jaxpr
    assert "scatter-add" in [one.name for one in inlined(traced)[0]]
    assert operations_of(traced).moved >= 3 * 4 * 8 * 64


@pytest.mark.parametrize("length", [16, 64])
def test_a_loop_writes_slices_in_place(length):
    def step(carry, number):
        x, whole = carry
        x = jnp.sin(x)
        return (x, jax.lax.dynamic_update_slice(whole, x[None], (number, 0, 0))), None

    def loop(x):
        whole = jnp.zeros((length, *x.shape))
        return jax.lax.scan(step, (x, whole), jnp.arange(length))[0]

    found = operations_of(jax.make_jaxpr(loop)(SQUARE).jaxpr)
    # x is read and written, and read and written once more; the whole is written once, as zeros.
    assert found.moved < 6 * length * 4 * 64 * 64
