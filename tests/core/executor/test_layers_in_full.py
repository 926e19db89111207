"""Of the first layers of every stage F stores x alone; the others keep to their policy."""

from math import prod

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from kinds import layer_params, mixed
from orders import near
from programs import LAYERS_EACH, find_scan, traced
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.executor.reference import step_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import Lockstep

EXAMPLES = 2


def problem(name, counts, unroll, remat_layers, *, model=TOY, order=None, **execution):
    """Return a pipeline on two ranks, its layout, parameters, layers and batch."""
    schedule = near(name, 2, 6)
    counts = tuple(counts * schedule.stages)[: schedule.stages]
    layout = StageLayout(counts, schedule.placement, order, unroll, remat_layers)
    shared, layers = toy_params(0, layout.layers, jnp.float64)
    if order:
        layers = [
            layers[i] if kind == "toy" else layer_params(jax.random.key(i), kind, jnp.float64)
            for i, kind in enumerate(order)
        ]
    batch = toy_batch(1, schedule.microbatches, EXAMPLES)
    mesh = make_mesh(2, devices=jax.devices()[:2])
    how = Execution(
        unroll_layers=unroll, remat_layers=remat_layers, poison_bubbles=True, **execution
    )
    pipeline = Pipeline(model, schedule, mesh, counts, how)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    return pipeline, layout, params, layers, batch


@pytest.mark.extended(unless=["None-1f1b", "1-zb_h1"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("unroll", [None, 1])
def test_the_step_equals_the_reference(name, unroll):
    """Stages of 3 and 4 layers, so that a slot is empty on one rank; NaN in free slots."""
    with jax.enable_x64(True):
        pairs = {} if unroll is None else {"lockstep": Lockstep(pairs=False)}
        pipeline, layout, params, layers, batch = problem(name, (3, 4), unroll, 2, **pairs)
        losses, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
        got = losses, gradients | {"layers": layout.unstack(gradients["layers"])}
        assert_same(got, losses_and_gradients_ref(TOY, params["embed_head"], layers, batch))


@pytest.mark.extended
def test_stages_of_several_kinds_equal_the_reference():
    """Two stages of which the first layers are of other kinds; a kind is in both forms."""
    order = ("routed", "toy", "toy", "toy", "toy", "routed", "routed", "toy")
    model = mixed(order)
    with jax.enable_x64(True):
        pipeline, layout, params, layers, batch = problem(
            "zb_h1", (4,), 1, 1, model=model, order=order
        )
        assert {len(run) for run in layout.runs} == {1, 2}
        variables = {"bias": jnp.zeros((len(order), 3))}
        got = jax.jit(pipeline.step)(params, batch, variables)
        want = step_ref(model, params["embed_head"], layers, batch, variables=variables)
        gradients = got.gradients | {"layers": layout.unstack(got.gradients["layers"])}
        assert_same((got.losses, gradients, got.aux), (want.losses, want.gradients, want.aux))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_each_layer_saves_the_bytes_of_its_residuals(name):
    """Of the scan's carry; all layers of a stage store as much as under full rematerialisation."""

    def carried(**execution):
        body = find_scan(traced(name, 4, 8, **execution)[0].jaxpr.jaxpr)
        return sum(prod(var.aval.shape) * var.aval.dtype.itemsize for var in body.outvars)

    every, one, none = (carried(remat_layers=count) for count in (LAYERS_EACH, 1, 0))
    assert every == carried(remat="full") < none
    assert 2 * one == every + none


def test_a_loop_ends_where_the_policy_changes():
    layout = StageLayout((5, 5), unroll=1, remat_layers=3)
    assert layout.runs == (range(0, 3), range(3, 5))
    assert layout.ring_groups == (range(0, 3), range(3, 5))
    assert [layout.ring_place_of(slot) for slot in (2, 3)] == [(0, 2), (1, 0)]
