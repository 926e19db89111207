"""The split of a layer into F, B and W against `jax.vjp`, and what it stores and computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import dot_flops
from jax.ad_checkpoint import checkpoint_name
from toy import KIND, toy_batch, toy_params

from jaxpipe.core.contract import Context, LayerOutput
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.core.split.jaxpr import equations_to, reads, trace_flat
from jaxpipe.core.split.split import Cotangent

pytestmark = pytest.mark.versions


@pytest.fixture
def layer_case():
    _, (params,) = toy_params(0, 1)
    context = Context(jax.tree.map(lambda a: a[0], toy_batch(1, 1, 3)))
    x = jax.random.normal(jax.random.key(2), (3, 6, 8))
    dy = jax.random.normal(jax.random.key(3), x.shape)
    return params, x, context, dy


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_vjp_bitwise(layer_case, policy):
    params, x, context, dy = layer_case
    split = split_layer(KIND.layer, params, x, context, POLICIES[policy])

    def whole(params, x, dy):
        y, pull = jax.vjp(lambda params, x: KIND.layer(params, x, context).y, params, x)
        return y, *pull(dy)

    def pieces(params, x, dy):
        output, kept = split.forward(params, x, context)
        dx, gradients = split.backward(params, context, kept, Cotangent(dy))
        return output.y, gradients.params, dx.value

    def finer(params, x, dy):
        output, kept = split.forward(params, x, context)
        dx, vectors, stash = split.backward_input(params, context, kept, Cotangent(dy))
        matrices = split.backward_weight(params, context, kept.for_w, stash)
        either = lambda vector, matrix: matrix if vector is None else vector  # noqa: E731
        both = {name: either(vectors.params[name], matrices.params[name]) for name in params}
        return output.y, both, dx.value

    want = jax.jit(whole)(params, x, dy)
    for got in (jax.jit(pieces)(params, x, dy), jax.jit(finer)(params, x, dy)):
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-6), got, want)
    # The same equations run one by one give the same bits: the split approximates nothing.
    with jax.disable_jit():
        want = whole(params, x, dy)
        for got in (pieces(params, x, dy), finer(params, x, dy)):
            jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("policy", "repeats"), [("none", 0), ("selective", 0), ("full", 1)])
def test_flops_of_the_pieces(layer_case, policy, repeats):
    params, x, context, dy = layer_case
    split = split_layer(KIND.layer, params, x, context, POLICIES[policy])
    forward = dot_flops(lambda p, x: KIND.layer(p, x, context), params, x)
    _, kept = split.forward(params, x, context)
    _, _, stash = split.backward_input(params, context, kept, Cotangent(dy))
    repeated = repeats * forward * 2 // 3  # up and gate of three equal products, once
    assert dot_flops(lambda p, x: split.forward(p, x, context), params, x) == forward
    assert dot_flops(lambda *a: split.backward(params, context, *a), kept, Cotangent(dy)) == (
        2 * forward + repeated
    )
    assert dot_flops(lambda *a: split.backward_input(params, context, *a), kept, Cotangent(dy)) == (
        forward + repeated
    )
    assert dot_flops(lambda *a: split.backward_weight(params, context, *a), kept.for_w, stash) == (
        forward
    )


def test_full_remat_keeps_only_the_input(layer_case):
    params, x, context, _ = layer_case
    split = split_layer(KIND.layer, params, x, context, POLICIES["full"])
    (kept,) = split.residuals.for_b
    assert (kept.shape, kept.dtype) == (x.shape, x.dtype)
    assert split.residuals.for_w == ()


def test_values_are_stored_by_name(layer_case):
    """`save_only_these_names`: F stores the input and the named value; B recomputes the rest."""
    params, x, context, dy = layer_case

    def layer(params, x, context):
        return LayerOutput(x + jnp.tanh(checkpoint_name(x @ params["up"], "wide")) @ params["down"])

    policy = jax.checkpoint_policies.save_only_these_names("wide")
    split = split_layer(layer, params, x, context, policy)
    _, kept = split.forward(params, x, context)
    assert [k.shape for k in jax.tree.leaves(kept)] == [(3, 6, 16), (3, 6, 8)]
    dx, _, stash = split.backward_input(params, context, kept, Cotangent(dy))
    matrices = split.backward_weight(params, context, kept.for_w, stash)
    _, pull = jax.vjp(lambda params, x: layer(params, x, context).y, params, x)
    want, want_dx = pull(dy)
    np.testing.assert_allclose(dx.value, want_dx, rtol=2e-6, atol=1e-6)
    for name in ("up", "down"):
        np.testing.assert_allclose(matrices.params[name], want[name], rtol=2e-6, atol=1e-6)
    forward = dot_flops(lambda p, x: layer(p, x, context), params, x)
    work = dot_flops(lambda *a: split.backward_input(params, context, *a), kept, Cotangent(dy))
    assert work == forward  # no product is repeated


def test_residuals_depend_on_x(layer_case):
    """Parameters, their casts, tables and masks are never stored per microbatch."""
    params, x, context, _ = layer_case

    def layer(params, x, context):
        table = jnp.sin(context.rows["positions"][..., None].astype(x.dtype))
        weight = params["up"].astype(jnp.bfloat16).astype(x.dtype)
        return LayerOutput(x + jnp.tanh((x * table) @ weight) @ params["down"])

    split = split_layer(layer, params, x, context)
    for kept in itertools.chain(*split._crossing.residuals[:2]):
        reached = equations_to(split._closed.jaxpr, [kept], ())
        inputs = {*reads(reached, [kept])}
        assert split._ports.x in inputs


def shapes(leaves):
    return sorted(leaf.shape for leaf in leaves)


def test_w_reads_one_gradient_and_one_input_a_matrix(layer_case):
    """Of W's inputs only the sum over positions is a residual; B recomputes the others."""
    params, x, context, _ = layer_case
    split = split_layer(KIND.layer, params, x, context)
    wide, narrow = (3, 6, 16), (3, 6, 8)
    assert shapes(split.residuals.for_w) == [narrow]
    assert shapes(split.stash) == sorted([wide, wide, narrow, narrow, wide])


def test_what_elementwise_equations_make_of_residuals_is_not_stored(layer_case):
    """A gated layer stores its input, one number a row of its norm, and products; no activation."""
    params, x, context, _ = layer_case
    split = split_layer(KIND.layer, params, x, context)
    wide, narrow, row = (3, 6, 16), (3, 6, 8), (3, 6, 1)
    found = shapes(split.residuals.for_b)
    assert [shape for shape in found if shape != row] == sorted([narrow, wide, wide])
    assert found.count(row) <= 2


def test_what_is_made_of_a_value_that_is_not_stored_is(layer_case):
    """The gradient of tanh needs only its output, and to recompute it would need a product."""
    params, x, context, _ = layer_case

    def layer(params, x, context):
        return LayerOutput(x + jnp.tanh(x @ params["up"]) @ params["down"])

    split = split_layer(layer, params, x, context)
    assert split.residuals.for_b == ()
    assert shapes(split.residuals.for_w) == [(3, 6, 8), (3, 6, 16)]


def test_an_opaque_layer_has_no_w(layer_case):
    params, x, context, dy = layer_case
    split = split_layer(jax.checkpoint(KIND.layer), params, x, context)
    _, kept = split.forward(params, x, context)
    _, _, stash = split.backward_input(params, context, kept, Cotangent(dy))
    assert dot_flops(lambda *a: split.backward_weight(params, context, *a), kept.for_w, stash) == 0


def test_a_loop_inside_a_layer_is_one_equation(layer_case):
    params, x, context, dy = layer_case

    def layer(params, x, context):
        _, rows = jax.lax.scan(
            lambda c, row: (c + row, jnp.tanh(c + row)), x[:, 0], x.swapaxes(0, 1)
        )
        return LayerOutput(x + rows.swapaxes(0, 1) @ params["up"] @ params["down"])

    split = split_layer(layer, params, x, context)
    _, kept = split.forward(params, x, context)
    dx, gradients = split.backward(params, context, kept, Cotangent(dy))
    got = dx.value, gradients.params
    _, pull = jax.vjp(lambda params, x: layer(params, x, context).y, params, x)
    want = pull(dy)[::-1]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-6), got, want)


def test_an_offloading_policy_stores_nothing_silently(layer_case):
    """A policy that answers anything but True does not store: the value is recomputed."""
    params, x, context, _ = layer_case
    split = split_layer(KIND.layer, params, x, context, lambda *_, **__: "offload")
    assert len(split.residuals.for_b) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_weight_gradients_are_products_of_rows(layer_case, policy):
    """W multiplies its operands, rows by rows, and transposes nothing afterwards."""
    params, x, context, dy = layer_case
    split = split_layer(KIND.layer, params, x, context, POLICIES[policy])
    _, kept = split.forward(params, x, context)
    _, _, stash = split.backward_input(params, context, kept, Cotangent(dy))
    made = jax.make_jaxpr(lambda *a: split.backward_weight(params, context, *a))
    equations = made(kept.for_w, stash).jaxpr.eqns
    products = [eqn for eqn in equations if eqn.primitive.name == "dot_general"]
    assert len(products) == 3
    for eqn in products:
        assert eqn.params["dimension_numbers"] == (((0, 1), (0, 1)), ((), ()))
    assert not any(eqn.primitive.name == "transpose" for eqn in equations)


@pytest.mark.parametrize("experts", [(), (3,)], ids=["matrix", "experts"])
def test_a_matrix_has_the_float32_product_of_16_bit_rows_as_its_gradient(experts):
    """Rounded, it would be off by 2^-9; nothing is transposed, and `dx` stays in 16 bits."""

    def layer(params, x, context):
        return LayerOutput(x @ params["up"])

    keys, shapes = jax.random.split(jax.random.key(0), 3), [(32, 8), (8, 16), (32, 16)]
    drawn = [jax.random.normal(k, (*experts, *s), "bfloat16") for k, s in zip(keys, shapes)]
    x, up, dy = drawn
    context = Context({})
    split = split_layer(layer, {"up": up}, x, context)
    _, kept = split.forward({"up": up}, x, context)
    run = jax.make_jaxpr(split.backward)({"up": up}, context, kept, Cotangent(dy))
    assert "transpose" not in {eqn.primitive.name for eqn in run.jaxpr.eqns}
    dx, gradients = split.backward({"up": up}, context, kept, Cotangent(dy))
    assert (dx.value.dtype, gradients.params["up"].dtype) == ("bfloat16", "float32")
    x, dy = (np.asarray(array, np.float64) for array in (x, dy))
    want = np.swapaxes(x, -1, -2) @ dy
    np.testing.assert_allclose(gradients.params["up"], want, rtol=1e-6, atol=1e-5)


def test_transposed_products_keep_precision_and_order():
    """`transpose(a @ b)` of two precisions, with several free axes on either side."""
    key = jax.random.key(0)
    a, b = jax.random.normal(key, (2, 3, 4)), jax.random.normal(key, (4, 5))

    def turned(a, b):
        product = jax.lax.dot_general(a, b, (((2,), (0,)), ((), ())), precision=("high", "default"))
        return jnp.transpose(product, (2, 0, 1)), jnp.transpose(product, (1, 0, 2))

    closed = trace_flat(turned, a, b)
    swapped, other = closed.jaxpr.outvars
    made_by = {eqn.outvars[0]: eqn for eqn in closed.jaxpr.eqns}
    assert made_by[swapped].primitive.name == "dot_general"
    assert made_by[swapped].params["precision"] == (
        jax.lax.Precision.DEFAULT,
        jax.lax.Precision.HIGH,
    )
    assert made_by[other].primitive.name == "transpose"
    values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, a, b)
    for got, want in zip(values, turned(a, b)):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_must_be_kept_is_never_made_again(layer_case, policy):
    """Named indices of largest values are stored although everything else is recomputed."""
    params, x, context, dy = layer_case

    def layer(params, x, context):
        choice = checkpoint_name(jnp.argmax(x, axis=-1), "choice")
        return LayerOutput(x + jnp.tanh(x) * jax.nn.one_hot(choice, x.shape[-1], dtype=x.dtype))

    def made_again(keep):
        split = split_layer(layer, params, x, context, POLICIES[policy], keep)
        _, kept = split.forward(params, x, context)
        backward = jax.make_jaxpr(split.backward)(params, context, kept, Cotangent(dy))
        dx, _ = split.backward(params, context, kept, Cotangent(dy))
        _, pull = jax.vjp(lambda x: layer(params, x, context).y, x)
        np.testing.assert_allclose(dx.value, pull(dy)[0], rtol=2e-6, atol=1e-6)
        return "argmax" in str(backward)

    assert not made_again(("choice",))
    assert made_again(()) == (policy != "none")


def test_a_gradient_that_reads_the_state_it_was_given_is_refused():
    def layer(w, x, context):
        return LayerOutput(jnp.tanh(x @ w) * context.state, context.state + x)

    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="not the state that it is given"):
        split_layer(layer, jnp.ones((4, 4)), x, Context({}, state=x))
