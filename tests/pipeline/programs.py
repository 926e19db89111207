"""The toy model's step, traced and compiled, for tests that look at the program."""

import jax
from toy import TOY, toy_batch, toy_params

from jaxpipe.parallel import StageLayout, make_mesh
from jaxpipe.pipeline import Execution, Pipeline
from jaxpipe.schedule import build

LAYERS_EACH = 2  # of every stage


def traced(name, pp, microbatches, *, examples=4, **execution):
    """The trace of the step of one schedule, and the schedule."""
    options = {"effort": 20_000} if name in ("zb_auto", "zbv", "v_half", "v_min") else {}
    schedule = build(name, pp=pp, microbatches=microbatches, **options)
    layout = StageLayout((LAYERS_EACH,) * schedule.stages, schedule.placement)
    shared, layers = toy_params(jax.random.key(0), layout.layers)
    params = {"shared": shared, "layers": layout.stack(layers)}
    batch = toy_batch(jax.random.key(1), microbatches, examples)
    mesh = make_mesh(pp, devices=jax.devices()[:pp])
    pipeline = Pipeline(TOY, schedule, mesh, execution=Execution(**execution))
    return jax.jit(pipeline.losses_and_gradients).trace(params, batch), schedule


def compiled(*args, **kwargs):
    return traced(*args, **kwargs)[0].lower().compile()
