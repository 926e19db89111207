"""The bytes that a traced function holds at once: by hand, and by XLA's own count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.model.kernels.cudnn_packed import packed_attention
from jaxpipe.planning.cost.liveness import working_set

SQUARE = 4 * 64 * 64  # bytes


def squares(count):
    return [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * count


def counted(function, live=(), stored=()):
    """Peak and results of a function of two squares, in squares."""
    jaxpr = jax.make_jaxpr(function)(*squares(2)).jaxpr
    chosen = ([jaxpr.invars[place] for place in places] for places in (live, stored))
    found = working_set(jaxpr, *chosen)
    return found.peak / SQUARE, found.results / SQUARE


@jax.jit
def gate(x, y):
    return jnp.tanh(x) * y


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w)


def chain(x, w):
    return jnp.sin(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)


def gates(x, w):
    a, b = x @ w, w @ x
    first = gate(a, b) @ w
    return jnp.sin(a * b) @ first


def loop(x, w):
    return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w) @ w, None), x, length=3)[0]


def accumulate(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, total: total + x @ w, jnp.tanh(x) @ w)


def scatter(x, w):
    """Add up the rows of a product by number."""
    places = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(jnp.zeros_like(x), np.zeros((64, 1), np.int32), x @ w, places)


# function and the squares that it holds
BY_HAND = {
    "elementwise equations are fused": (lambda x, w: jnp.tanh(jnp.exp(x) + w), 0),
    "a product, and the tanh of it that the next one reads": (chain, 2),
    "a fused value keeps alive what it is computed from": (gates, 4),  # a, b, first, sin(a b)
    "a function that is called twice has its own values": (
        lambda x, w: layer(x, w) @ layer(w, x), 3,  # the first tanh, a product and its tanh
    ),
    "the caller adds a product that is returned": (lambda x, w: x @ w, 0),
    "a product is added in place": (lambda x, w: jnp.tanh(x @ w + w) @ w, 2),
    "a product reads a transposed operand": (lambda x, w: (x @ w) @ w.T, 1),
    "a barrier copies nothing": (lambda x, w: jax.lax.optimization_barrier(x @ w) @ w, 1),
    "the caller adds what is scattered": (scatter, 1),  # the product
    "a scatter writes where its operand is": (lambda x, w: scatter(x, w) @ w, 2),
    "the body of a loop, and its carry": (loop, 3),
    "a loop adds to its carry in place": (accumulate, 2),  # tanh(x), and then its product
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_counted_by_hand(case):
    function, peak = BY_HAND[case]
    assert counted(function)[0] == peak


def test_inputs_and_results():
    """What is live before, what is read from a ring buffer, and what is written to one later."""

    def returning(x, w):
        hidden = x @ w
        return jnp.tanh(hidden) @ w, hidden

    assert counted(returning) == (2, 1)
    assert counted(returning, live=[0]) == (2, 1)  # x is read by the first product only
    assert counted(returning, live=[1]) == counted(returning, stored=[1]) == (3, 1)


def repeat_sum(x):
    return jax.lax.scan(lambda carry, _: (jax.lax.psum(carry, "i"), None), x, length=2)[0]


@pytest.mark.parametrize("add_up", [lambda x: jax.lax.psum(x, "i"), repeat_sum])
def test_what_is_live_until_the_last_collective(add_up):
    """What later products take does not count, also where a loop has the collective."""

    def function(x, w):
        total = add_up(x @ w)
        first, second = total @ w, w @ total
        return (first @ second) @ total

    alone = jax.make_jaxpr(add_up, axis_env=[("i", 2)])(*squares(1)).jaxpr
    traced = jax.make_jaxpr(function, axis_env=[("i", 2)])(*squares(2)).jaxpr
    found, of_sum = working_set(traced), working_set(alone, live=alone.invars)
    assert found.sending == of_sum.peak == of_sum.sending
    assert found.peak == 4 * SQUARE > found.sending  # total, first, second and their product
    plain = jax.make_jaxpr(chain)(*squares(2)).jaxpr
    assert working_set(plain).sending == 0


def squared_loss(x, w):
    return (chain(x, w) ** 2).sum()


def gated_loss(x, w):
    hidden = jax.nn.relu(x @ w) * (w @ x)
    return ((hidden @ w) ** 2).sum()


@pytest.mark.parametrize(
    "function", [chain, jax.grad(squared_loss, (0, 1)), jax.grad(gated_loss, (0, 1))],
    ids=["chain", "gradient", "gated"],
)  # fmt: skip
def test_between_the_bounds_of_xla(function):
    """XLA's temporaries are at most the count, and the count at most these and the results.

    XLA computes in the memory of the results before it writes them; the count leaves them out.
    """
    compiled = jax.jit(function).lower(*squares(2)).compile().memory_analysis()
    temporaries = compiled.temp_size_in_bytes / SQUARE
    results = compiled.output_size_in_bytes / SQUARE
    assert temporaries - 0.1 <= counted(function)[0] <= temporaries + results, (
        temporaries,
        results,
    )


def test_cudnns_gradient_of_packed_rows_has_a_workspace():
    """8 bytes for every value of q and each document: 4 rows of 128 tokens, 8 heads of 16."""
    q, kv, row = (4, 128, 8, 16), (4, 128, 2, 16), jax.ShapeDtypeStruct((4, 5), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, kv, kv)]

    def gradient(q, k, v, first, length):
        attend = lambda q, k, v: packed_attention(q, k, v, first, length, jnp.int32(0), 0)  # noqa: E731
        mixed, pull = jax.vjp(attend, q, k, v)
        return pull(mixed)

    peak = working_set(jax.make_jaxpr(gradient)(*arrays, row, row).jaxpr).peak
    values = 4 * 128 * 8 * 16
    assert 0 < peak - 5 * 8 * values < 10 * values
