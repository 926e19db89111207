"""Layers in halves of the rows, and the phases in which their equations run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from programs import dot_flops
from toy import KIND, toy_batch, toy_params

from jaxpipe.core.contract import Aux, Context, LayerKind, LayerOutput
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.core.split.halves import layer_in_halves, tie
from jaxpipe.core.split.phases import run_beside_products, run_in_phases
from jaxpipe.core.split.split import Cotangent


def case(dtype, rows=4):
    _, (params,) = toy_params(0, 1)
    context = Context(jax.tree.map(lambda leaf: leaf[0], toy_batch(1, 1, rows)))
    x, dy = (jax.random.normal(jax.random.key(seed), (rows, 6, 8)) for seed in (2, 3))
    cast = partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
    return cast(params), cast(x), context, cast(dy)


def gradients(kind, policy, params, x, context, dy):
    split = split_layer(kind.layer, params, x, context, POLICIES[policy], kind.keep)
    output, residuals = split.forward(params, x, context)
    dx, of_weights = split.backward(params, context, residuals, Cotangent(dy))
    return output.y, dx.value, of_weights.params


@pytest.mark.parametrize("policy", POLICIES)
def test_halves_equal_all_rows_at_once(policy):
    with jax.enable_x64(True):
        given = case(jnp.float64)
        want, got = (jax.jit(partial(gradients, kind, policy))(*given) for kind in both_kinds())
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13), got, want)


def test_gradients_of_halves_are_rounded_no_more_than_of_all_rows():
    """The sum of two bfloat16 gradients would differ by up to 2^-9 of itself."""
    runs = [jax.jit(partial(gradients, kind, "full")) for kind in both_kinds()]
    want, got = (run(*case(jnp.bfloat16))[2] for run in runs)
    for name, leaf in want.items():
        assert got[name].dtype == leaf.dtype == jnp.float32
        error = np.linalg.norm(got[name] - leaf) / np.linalg.norm(leaf)
        assert error < 1e-6, name


def hyperbolic(params, x, context):
    return LayerOutput(x + jnp.tanh(x @ params["up"]) @ params["down"])  # B and W read the tanh


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [KIND, LayerKind(hyperbolic)], ids=["toy", "hyperbolic"])
def test_halves_store_and_compute_as_much_as_all_rows(kind, policy):
    params, x, context, dy = case(jnp.bfloat16)
    sizes, flops = [], []
    for one in (kind, layer_in_halves(kind, "rows")):
        split = split_layer(one.layer, params, x, context, POLICIES[policy])
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves((split.residuals, split.stash))))
        jaxpr = jax.make_jaxpr(partial(gradients, one, policy))(params, x, context, dy).jaxpr
        flops.append(dot_flops(jaxpr, None))
    assert sizes[0] == sizes[1]
    assert flops[0] == flops[1]


def both_kinds():
    return KIND, layer_in_halves(KIND, "rows")


def test_auxiliary_outputs_are_those_of_all_rows():
    def layer(params, x, context):
        scaled = x * context.variables["scale"]
        losses = {"square": ((scaled**2).sum(), x.size)}
        return LayerOutput(
            scaled * params,
            None,
            Aux(losses, {"total": x.sum()}, {"largest": x.max()}, {"first": x[:, 0]}),
        )

    x = jnp.arange(12.0).reshape(4, 3)
    context = Context({}, variables={"scale": jnp.ones(())})
    want, got = (
        kind.layer(jnp.ones(()), x, context)
        for kind in (LayerKind(layer), layer_in_halves(LayerKind(layer), "rows"))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_statistics_of_halves_are_their_maximum():
    @jax.custom_vjp
    def observed(x, statistic):
        return x

    observed.defvjp(lambda x, _: (x, x), lambda x, dy: (dy, jnp.abs(x).max()))
    kind = LayerKind(
        lambda params, x, context: LayerOutput(observed(x, context.variables["seen"]) * params),
        statistics=("seen",),
    )
    x = jnp.arange(12.0).reshape(4, 3)
    context = Context({}, variables={"seen": jnp.zeros(())})
    halves = layer_in_halves(kind, "rows")
    split = split_layer(halves.layer, jnp.ones(()), x, context, statistics=kind.statistics)
    _, residuals = split.forward(jnp.ones(()), x, context)
    dx, _, _ = split.backward_input(jnp.ones(()), context, residuals, Cotangent(x))
    assert dx.statistics["seen"] == 11


def test_an_odd_number_of_rows_is_refused():
    params, x, context, _ = case(jnp.float32, rows=3)
    with pytest.raises(ValueError, match="even number of rows"):
        jax.eval_shape(layer_in_halves(KIND, "rows").layer, params, x, context)


def test_every_phase_has_products_of_one_half_and_collectives_of_the_other():
    """Of a gather, two products and a scatter in every layer, only the ends stand alone."""
    beside = ["dot", "dot", "gather", "scatter"]
    phases = phases_of(lambda x: layers_in_halves(x, 2))
    assert [*map(sorted, phases)] == [
        ["gather"], ["dot", "dot", "gather"], beside, beside, ["dot", "dot", "scatter"], ["scatter"]
    ]  # fmt: skip


def test_a_phase_ends_with_its_last_collective():
    """What reads it, as an adapter's product or a change of layout, is in the next phase."""

    def read(x, params):
        return mlp(jnp.sin(x), params)

    beside = ["dot", "dot", "gather", "scatter", "sin"]
    phases = phases_of(lambda x: layers_in_halves(x, 2, of=read))
    assert [*map(sorted, phases)] == [
        ["gather"], ["dot", "dot", "gather", "sin"], beside, beside,
        ["dot", "dot", "scatter", "sin"], ["scatter"],
    ]  # fmt: skip


def test_what_is_added_to_a_collective_is_beside_it():
    """Nothing else is beside the last one; a shared expert is such a summand."""
    phases = phases_of(lambda x: layers_in_halves(x, 2, shared=True))
    beside = ["dot"] * 4 + ["gather", "scatter"]
    assert [*map(sorted, phases)] == [
        ["gather"], ["dot", "dot", "gather"], beside, beside, ["dot"] * 4 + ["scatter"],
        ["dot", "dot", "scatter"],
    ]  # fmt: skip


def test_a_layer_in_a_conditional_has_phases_of_its_own():
    run = LayerRun(KIND, None, jnp.int32(0), active=jnp.bool_(True), ring=0)

    def conditional(x):
        return run.run_if_active(lambda x: (layers_in_halves(x, 2),), (x,), "rows")

    assert phases_of(conditional) == phases_of(lambda x: layers_in_halves(x, 2))


def test_ties_between_layers_keep_halves_apart():
    """Parameters that a barrier ties to x are not of a half, and the second half is not tied."""

    def tied(y, params):
        return tie(y, params, "rows")

    free = phases_of(lambda x: layers_in_halves(x, 2))
    assert phases_of(lambda x: layers_in_halves(x, 2, tied)) == free


@pytest.mark.parametrize("has_product", [False, True])
def test_a_gather_ends_before_a_collective_that_no_product_follows(has_product):
    """With a product at the end of the layer it ends with y."""

    def layer(x):
        full = lax.all_gather(x, "tp", axis=1, tiled=True)
        y = lax.psum_scatter(of(full), "tp", scatter_dimension=1, tiled=True)
        return (jnp.sin(of(y) if has_product else y),)

    def of(x):
        return mlp(x, jnp.ones((8, 32)))

    def both(x):
        (y,), gathered = run_beside_products(lambda: layer(x), 2 * x)
        return y, gathered

    def compare(x):
        return jnp.stack([*both(x), *layer(x), 2 * x])

    before = ["gather", "dot", "dot"]
    want = (
        [[*before, "scatter", "dot", "dot", "sin"]] if has_product else [before, ["scatter", "sin"]]
    )
    assert phases_of(both, within=lambda run: run()[0]) == want
    y, gathered, *others = on_two_devices(compare)(case(jnp.float32)[1])
    np.testing.assert_array_equal((y, gathered), others)


def test_a_second_half_of_sequences_starts_after_the_keys_of_the_first():
    """Its queries read them, a phase later; in other respects halves are as those of rows."""
    beside = ["dot", "dot", "gather", "scatter"]
    phases = phases_of(lambda x: reading_layer(x).y)
    assert [*map(sorted, phases)] == [
        ["gather"], ["dot", "dot", "gather"], beside[:2] + beside[3:], ["scatter"]
    ]  # fmt: skip


def reading_layer(x):
    def layer(params, x, context):
        full = lax.all_gather(x, "tp", axis=2, tiled=True)
        state = context.state + full.sum(1)
        product = (full + state[:, None]) @ params @ params.T
        y = x + lax.psum_scatter(product, "tp", scatter_dimension=2, tiled=True)
        return LayerOutput(y, state)

    def nothing(x, rows):
        return jnp.zeros((x.shape[0], 2 * x.shape[2]))

    kind = layer_in_halves(LayerKind(layer, state=nothing), "sequence")
    return kind.layer(jnp.ones((16, 32)), x, Context({"inputs": jnp.zeros((4, 6))}))


def test_halves_of_sequences_need_a_state():
    with pytest.raises(ValueError, match="give the layer kind a state, or halve the rows"):
        layer_in_halves(KIND, "sequence")


def mlp(x, params):
    return jnp.tanh(x @ params) @ params.T


def layers_in_halves(x, layers, tied=None, of=mlp, *, shared=False):
    def layer(params, x, context):
        full = lax.all_gather(x, "tp", axis=1, tiled=True)
        product = of(full, params)
        y = x + lax.psum_scatter(product, "tp", scatter_dimension=1, tiled=True)
        return LayerOutput(y + mlp(x, params) if shared else y)

    params = jnp.ones((8, 32))
    for _ in range(layers):
        x = layer_in_halves(LayerKind(layer), "rows").layer(params, x, Context({})).y
        x, params = tied(x, params) if tied else (x, params)
    return x


def on_two_devices(function):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",), axis_types=(AxisType.Auto,))
    every = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)


def phases_of(function, within=run_in_phases):
    """Return, between barriers, the products and collectives of a function on two devices."""
    run = on_two_devices(lambda x: within(lambda: function(x)))
    (outer,) = jax.make_jaxpr(run)(jnp.ones((4, 6, 8))).jaxpr.eqns
    jaxpr = outer.params["jaxpr"]
    if jaxpr.eqns[-1].primitive.name == "cond":
        jaxpr = jaxpr.eqns[-1].params["branches"][1].jaxpr
    names = {"dot_general": "dot", "all_gather": "gather", "reduce_scatter": "scatter"}
    names |= {"sin": "sin"}
    phases = [[]]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier" and phases[-1]:
            phases.append([])
        elif eqn.primitive.name in names:
            phases[-1].append(names[eqn.primitive.name])
    return [phase for phase in phases if phase]
