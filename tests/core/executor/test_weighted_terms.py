"""Losses whose terms have weights: the sum by which they are divided may be below 1."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import build
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.reference import step_ref
from jaxpipe.core.mesh import make_mesh

BATCH, (SHARED, LAYERS) = toy_batch(0, 2, 1), toy_params(0, 1)


def on_a_mesh(functions, compute_dtype):
    mesh, how = make_mesh(1, devices=jax.devices()[:1]), Execution(compute_dtype=compute_dtype)
    pipeline = Pipeline(functions, build("1f1b", pp=1, microbatches=2), mesh, (1,), how)
    params = {"embed_head": SHARED, "layers": pipeline.layout(1).stack(LAYERS)}
    return jax.jit(pipeline.step)(params, BATCH)


def one_by_one(functions, _):
    return step_ref(functions, SHARED, LAYERS, BATCH)


@pytest.mark.extended(only=["on_a_mesh-float16", "one_by_one-None"])
@pytest.mark.parametrize(
    ("step", "dtype"), [(on_a_mesh, None), (on_a_mesh, jnp.float16), (one_by_one, None)]
)
def test_a_weight_scales_losses_and_gradients(step, dtype):
    """A power of two, which rounds nothing."""
    toy = replace(TOY, head=lambda *given: TOY.head(*given).astype(jnp.float32))
    one, few = (
        step(replace(toy, count=lambda rows, weight=weight: weight), dtype)[:2]
        for weight in (jnp.int32(1), jnp.float32(2**-8))
    )
    assert one[0].sum() > 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a * 2**8, b), one, few)
