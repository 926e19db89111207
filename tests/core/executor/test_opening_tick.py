"""The first tick, outside the scan: its F gathers the parameters that the scan reads."""

from dataclasses import replace

import jax
import pytest
from orders import build
from programs import step_of
from toy import TOY, toy_batch, toy_params
from toy_steps import check, uneven

from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.ticks import opening_tick
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import Lockstep, lower

HOW = {"overlap_sums": True, "zero_stage": 1}
LAYERS = 3  # of each stage


def trace(schedule, **execution):
    """Return the trace of a step of the toy on two replicas."""
    layout = StageLayout((LAYERS,) * schedule.stages, schedule.placement)
    shared, layers = toy_params(0, layout.layers)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    batch = toy_batch(1, schedule.microbatches, 4)
    mesh = make_mesh(2, 2, devices=jax.devices()[:4])
    pipeline = Pipeline(TOY, schedule, mesh, execution=Execution(**execution))
    return jax.jit(pipeline.losses_and_gradients).trace(params, batch)


def test_no_parameter_is_gathered_twice():
    """What is gathered before the first tick is not used, so XLA removes it."""
    schedule = build("1f1b", pp=2, microbatches=4)
    texts = [trace(schedule, **how).lower().compile().as_text() for how in (HOW, {"zero_stage": 1})]
    assert len({text.count(" all-gather(") for text in texts}) == 1


def test_each_layer_is_gathered_beside_the_layer_before_it():
    """Barriers tie the gather to the input of that layer, and its result to the output.

    One more per layer ties what it stores to the output of the next.
    """
    schedule = build("1f1b", pp=2, microbatches=4)
    names = [eqn.primitive.name for eqn in step_of(trace(schedule, **HOW).jaxpr.jaxpr).eqns]
    before = names[: names.index("scan")]
    assert before.count("optimization_barrier") == 3 * (LAYERS - 1)


@pytest.mark.extended(unless=["1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_a_step_is_that_of_one_device(name):
    schedule = build(name, pp=2, microbatches=4)
    lockstep = Lockstep(phases=1 + (name == "1f1b"))
    check(schedule, uneven(schedule.stages), 2, lockstep=lockstep, **HOW)


def test_where_the_first_tick_has_other_work_all_ticks_are_scanned():
    how, tables = Execution(**HOW), lower(build("1f1b", pp=2, microbatches=4))
    assert opening_tick(tables, how) == 0
    assert opening_tick(lower(build("zbv", pp=2, microbatches=4)), how) == 0
    assert opening_tick(tables, replace(how, zero_stage=0)) is None  # nothing to gather
    assert opening_tick(tables, replace(how, overlap_sums=False)) is None
    for name, pp in (("1f1b", 1), ("dualpipe", 2)):  # one has the head in it, one sends parameters
        assert opening_tick(lower(build(name, pp=pp, microbatches=4)), how) is None
