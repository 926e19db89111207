"""The example that DeepSeek ships with DualPipe, at smaller sizes.

Every stage is Linear(h, 4h), GELU, Linear(4h, h); 20 chunks of 3 examples; the loss is the mean
squared error. The first half of the chunks enters at rank 0, the second at the last rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from orders import build

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Pipeline, step_ref
from jaxpipe.core.mesh import StageLayout, make_mesh

CHUNKS, EXAMPLES, LENGTH, HIDDEN = 20, 3, 16, 32

EXAMPLE = StageFunctions(
    embed=lambda shared, mb: mb["inputs"],
    kinds=LayerKind(
        lambda p, x, _: LayerOutput(jax.nn.gelu(x @ p["up"], approximate=False) @ p["down"])
    ),
    head=lambda shared, x, mb: jnp.sum((x - mb["labels"]) ** 2),
    count=lambda mb: jnp.size(mb["labels"]),
    outputs=lambda shared, x, mb: x,
)


def normal(key, *shape):
    return jax.random.normal(jax.random.key(key), shape, jnp.float64)


@pytest.mark.extended
@pytest.mark.slow(unless=["4-dualpipe"])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_losses_outputs_and_gradients(name, pp):
    schedule = build(name, pp=pp, microbatches=CHUNKS)
    layout = StageLayout((1,) * schedule.stages, schedule.placement)
    with jax.enable_x64(True):
        layers = [
            {
                "up": normal(2 * s, HIDDEN, 4 * HIDDEN) / HIDDEN**0.5,
                "down": normal(2 * s + 1, 4 * HIDDEN, HIDDEN) / (4 * HIDDEN) ** 0.5,
            }
            for s in range(schedule.stages)
        ]
        batch = {
            "inputs": normal(233, CHUNKS, EXAMPLES, LENGTH, HIDDEN),
            "labels": normal(234, CHUNKS, EXAMPLES, LENGTH, HIDDEN),
        }
        pipeline = Pipeline(EXAMPLE, schedule, make_mesh(pp, devices=jax.devices()[:pp]))
        params = {"embed_head": {}, "layers": layout.stack(layers)}
        trained = jax.jit(pipeline.step)(params, batch)
        evaluated = jax.jit(pipeline.forward)(params, batch)
        want = step_ref(EXAMPLE, {}, layers, batch)
        assert_same(trained.gradients["layers"], layout.stack(want.gradients["layers"]))
    assert evaluated.gradients is None
    for got in (trained, evaluated):
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-14)
        np.testing.assert_allclose(got.outputs, want.outputs, rtol=1e-13, atol=1e-14)
