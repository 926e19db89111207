"""Loops over the layers of a pipeline rank: the numbers, the size and the copies of the program."""

import re

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from kinds import layer_params, mixed
from orders import near
from programs import eqns_of, executed_flops
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.executor.reference import step_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import ORDERS, Costs, Lockstep, recompute_ahead

EXAMPLES = 2
ZERO_3 = {"zero_stage": 3, "reshard_after_forward": True}
AHEAD = {"recomputes": True, "remat": "full"}
HALVES = {"layers_per_iteration": 2, "overlap_halves": "rows"}


def looped(name, counts, dp=1, *, unroll=1, dtype=jnp.float32, recomputes=False, **execution):
    """Return a pipeline of toy layers on two ranks, its layout, parameters, layers and batch."""
    schedule = near(name, 2, 6, virtual_stages=2)
    if recomputes:
        schedule, execution["lockstep"] = recompute_ahead(schedule, Costs(R=1.0))
    counts = tuple(counts * schedule.stages)[: schedule.stages]
    layout = StageLayout(counts, schedule.placement, unroll=unroll)
    shared, layers = toy_params(0, layout.layers, dtype)
    batch = toy_batch(1, schedule.microbatches, EXAMPLES * dp)
    mesh = make_mesh(2, dp, devices=jax.devices()[: 2 * dp])
    pipeline = Pipeline(TOY, schedule, mesh, counts, Execution(unroll_layers=unroll, **execution))
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    return pipeline, layout, params, layers, batch


@pytest.mark.extended(unless=["1f1b-2-execution1"])
@pytest.mark.slow(
    unless=[
        "zb_h1-2-execution0",
        "1f1b-2-execution1",
        "1f1b-1-execution5",
        "interleaved_1f1b-1-*",
        "*-execution7",
    ]
)
@pytest.mark.parametrize(
    ("name", "dp", "execution"),
    [("zb_h1", 2, {}), ("1f1b", 2, ZERO_3), ("zb_h1", 2, ZERO_3), ("1f1b", 2, {"zero_stage": 1})]
    + [("1f1b", 2, {"overlap_sums": True, "zero_stage": 2})]
    + [("1f1b", 1, {"layers_per_iteration": 3}), ("zb_h1", 2, ZERO_3 | {"layers_per_iteration": 2})]
    + [("1f1b", 2, ZERO_3 | AHEAD), ("zb_h1", 1, AHEAD)]
    + [("1f1b", 1, HALVES), ("zb_h1", 2, HALVES | ZERO_3), ("1f1b", 2, HALVES | ZERO_3 | AHEAD)]
    + [(name, 1, {"lockstep": Lockstep(pairs=False)}) for name in ORDERS],
)
def test_a_loop_equals_the_reference(name, dp, execution):
    """Stages of 3 and 5 layers, so that the slots of the second run are empty on one rank.

    Free slots of ring buffers are NaN.
    """
    with jax.enable_x64(True):
        pipeline, layout, params, layers, batch = looped(
            name, (3, 5), dp, dtype=jnp.float64, poison_bubbles=True, **execution
        )
        assert {len(run) for run in layout.runs} == {2, 3}
        losses, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
        assert gradients["layers"][0]["up"].shape == (2, 3, 8, 16)
        got = losses, gradients | {"layers": layout.unstack(gradients["layers"])}
        assert_same(got, losses_and_gradients_ref(TOY, params["embed_head"], layers, batch))


@pytest.mark.extended(unless=["1f1b-execution0"])
@pytest.mark.parametrize(
    ("name", "execution"),
    [
        ("1f1b", {"zero_stage": 2}),
        ("1f1b", {"zero_stage": 1, "layers_per_iteration": 2, "grad_reduce_dtype": jnp.float64}),
        ("zb_h1", {"zero_stage": 1}),
    ],
)
def test_a_loop_reduces_its_gradients_layer_by_layer(name, execution):
    """The closing tick has no empty slot, so its loop also has the collectives over dp."""
    with jax.enable_x64(True):
        pipeline, layout, params, layers, batch = looped(
            name, (3,), 2, dtype=jnp.float64, poison_bubbles=True, overlap_sums=True, **execution
        )
        step = jax.jit(pipeline.losses_and_gradients)
        losses, gradients = step(params, batch)
        got = losses, gradients | {"layers": layout.unstack(gradients["layers"])}
        assert_same(got, losses_and_gradients_ref(TOY, params["embed_head"], layers, batch))
        equations = list(eqns_of(step.trace(params, batch).jaxpr.jaxpr))
    of_all = {
        eqn.invars[0].aval.shape
        for eqn, _ in equations
        if eqn.primitive.name in ("psum", "reduce_scatter") and eqn.invars[0].aval.ndim == 3
    }
    assert {shape[0] for shape in of_all} == {1}  # the sums of one layer, never those of 3


@pytest.mark.extended(unless=["1f1b-execution0"])
@pytest.mark.parametrize(
    ("name", "execution"),
    [
        ("1f1b", {}),
        ("1f1b", {"layers_per_iteration": 2}),
        ("1f1b", AHEAD),
        ("1f1b", HALVES),
        ("interleaved_1f1b", {}),
    ],
)
def test_a_gradient_is_reduced_after_the_next_gather(name, execution):
    """Otherwise XLA gathers after the last product of an iteration, where nothing hides it."""
    with jax.enable_x64(True):
        pipeline, layout, params, layers, batch = looped(
            name, (3,), 2, dtype=jnp.float64, poison_bubbles=True, **ZERO_3 | execution
        )
        step = jax.jit(pipeline.losses_and_gradients)
        losses, gradients = step(params, batch)
        got = losses, gradients | {"layers": layout.unstack(gradients["layers"])}
        assert_same(got, losses_and_gradients_ref(TOY, params["embed_head"], layers, batch))
        equations = [eqn for eqn, _ in eqns_of(step.trace(params, batch).jaxpr.jaxpr)]
    made_by = {out: eqn for eqn in equations for out in eqn.outvars}
    barriers = [
        made_by[eqn.invars[0]]
        for eqn in equations
        if eqn.primitive.name == "reduce_scatter" and eqn.invars[0] in made_by
    ]
    waits = [
        made_by[eqn.invars[1]].primitive.name
        for eqn in barriers
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert set(waits) == {"all_gather"}


@pytest.mark.extended
@pytest.mark.slow(unless=["1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_runs_of_several_kinds_equal_the_reference(name):
    """Two runs of one kind in a stage share ring buffers; auxiliary outputs add up in loops."""
    schedule = near(name, 2, 4, virtual_stages=2)
    order = ("routed", "routed", "toy", "routed", "routed", "routed") * schedule.stages
    model, counts = mixed(order), (6,) * schedule.stages
    with jax.enable_x64(True):
        layout = StageLayout(counts, schedule.placement, order, unroll=1)
        assert max(map(len, layout.runs)) == 3
        shared, toys = toy_params(0, len(order), jnp.float64)
        layers = [
            toys[i] if kind == "toy" else layer_params(jax.random.key(i), kind, jnp.float64)
            for i, kind in enumerate(order)
        ]
        batch = toy_batch(1, schedule.microbatches, EXAMPLES)
        variables = {"bias": jnp.zeros((len(order), 3))}
        how = Execution(unroll_layers=1, poison_bubbles=True)
        mesh = make_mesh(2, devices=jax.devices()[:2])
        pipeline = Pipeline(model, schedule, mesh, counts, how)
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        got = jax.jit(pipeline.step)(params, batch, variables)
        want = step_ref(model, shared, layers, batch, variables=variables)
        gradients = got.gradients | {"layers": layout.unstack(got.gradients["layers"])}
        assert_same(
            (got.losses, gradients, got.aux, got.aux_losses),
            (want.losses, want.gradients, want.aux, want.aux_losses),
        )


def test_the_program_does_not_grow_with_layers():
    sizes = {}
    for layers in (3, 12):
        pipeline, _, params, _, batch = looped("zb_h1", (layers,))
        traced = jax.jit(pipeline.losses_and_gradients).trace(params, batch)
        sizes[layers] = len(traced.lower().as_text().splitlines())
    assert sizes[12] == sizes[3]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_a_loop_multiplies_as_much_as_unrolled_layers(name):
    """On each rank of a step, by the products that its branches execute."""
    found = {}
    for unroll in (1, 4):
        pipeline, layout, params, _, batch = looped(name, (4,), unroll=unroll)
        assert max(map(len, layout.runs)) == (4 if unroll == 1 else 1)
        trace = jax.jit(pipeline.losses_and_gradients).trace(params, batch)
        found[unroll] = [executed_flops(trace, pipeline.tables, rank) for rank in range(2)]
    assert found[1] == found[4]
    assert min(found[1]) > 0


def test_an_iteration_has_as_many_layers_as_it_is_given():
    pipeline, _, params, _, batch = looped("1f1b", (4,), layers_per_iteration=2)
    jaxpr = jax.make_jaxpr(pipeline.losses_and_gradients)(params, batch).jaxpr
    of_layers = [eqn for eqn, *_ in eqns_of(jaxpr) if eqn.params.get("unroll", 1) > 1]
    assert [(eqn.params["unroll"], eqn.params["length"]) for eqn in of_layers] == [(2, 4)] * 2


@pytest.mark.slow(unless=["1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_nothing_is_copied_in_the_loop(name):
    """Neither ring buffers `[layers x slots, ...]` nor gradient sums `[layers, ...]`."""
    layers = 5
    pipeline, _, params, _, batch = looped(name, (layers,))
    text = jax.jit(pipeline.losses_and_gradients).lower(params, batch).compile().as_text()
    loop = text.replace(text[text.index("ENTRY") :], "")
    rings = {int(size) for size in re.findall(rf"f32\[(\d+),{EXAMPLES},6,\d+\]", loop)}
    rings = {size for size in rings if size % layers == 0}
    assert rings
    assert f"f32[{layers},8,16]" in loop
    sizes = "|".join(map(str, rings))
    assert not re.findall(rf"f32\[(?:{sizes}),{EXAMPLES},6,\d+\]\S* copy\(", loop)
    assert not re.findall(rf"f32\[{layers},\d+,\d+\]\S* copy\(", loop)


def test_the_closing_tick_has_one_accumulator():
    """Gradients that do not count are left out by layer: all at once would need a second one."""
    pipeline, _, params, _, batch = looped("1f1b", (3,), 2, overlap_sums=True)
    trace = jax.jit(pipeline.losses_and_gradients).trace(params, batch)
    chosen = {
        eqn.outvars[0].aval.shape
        for eqn, _ in eqns_of(trace.jaxpr.jaxpr)
        if eqn.primitive.name == "select_n"
    }
    assert (8, 16) in chosen
    assert (3, 8, 16) not in chosen


def test_layers_on_the_host_have_no_loop():
    pipeline, _, params, _, batch = looped("1f1b", (3,), offload_layers=1)
    with pytest.raises(ValueError, match="unroll_layers=1 with offload_layers=1"):
        pipeline.losses_and_gradients(params, batch)
