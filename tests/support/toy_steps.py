"""A step of the toy under any schedule, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
from compare import assert_same
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import StageLayout, make_mesh


def run(schedule, counts, dp=1, *, ignore="some", dtype=jnp.float32, key=0, **execution):
    """Return `(losses, gradients)` of the pipeline and of the reference, stage-stacked."""
    pp, layout = schedule.pp, StageLayout(tuple(counts), schedule.placement)
    shared, layers = toy_params(key, layout.layers, dtype)
    batch = toy_batch(key + 1, schedule.microbatches, 2 * dp, ignore)
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    pipeline = Pipeline(TOY, schedule, mesh, counts, Execution(**execution))
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.losses_and_gradients)(params, batch)
    reference = losses_and_gradients_ref(TOY, shared, layers, batch)
    losses, gradients = jax.device_get(reference)
    want = losses, gradients | {"layers": layout.stack(gradients["layers"])}
    return got, want


def check(schedule, counts, dp=1, **how):
    """Check that both agree in float64 with NaN in free slots; return the losses."""
    with jax.enable_x64(True):
        got, want = run(schedule, counts, dp, dtype=jnp.float64, poison_bubbles=True, **how)
        assert got[1]["layers"][0]["up"].dtype == jnp.float64
        assert_same(got, want)
        return np.asarray(got[0])


def uneven(stages):
    return [1 + (stage % 3 == 1) for stage in range(stages)]
