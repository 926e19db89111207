"""Sums over tokens are computed in float32, whatever dtype a step computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import build

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import StageLayout, make_mesh

SUMS = {"reduce_sum", "scatter-add", "cumsum"}
ENTRIES, WIDTH, LENGTH = 8, 16, 4096


def looked_up(schedule, dtype, tokens, weights, dtype_of_total=jnp.float32):
    """Return gradients of a table, gains and biases of a weighted sum as loss, on two ranks."""

    def layer(params, x, context):
        def turn(x, _):
            return jnp.broadcast_to(params["inner"], x.shape) + x, None

        x, _ = jax.lax.scan(turn, x, None, length=1)
        return LayerOutput(x * params["gain"] + params["bias"])

    functions = StageFunctions(
        embed=lambda shared, rows: shared["table"][rows["inputs"]],
        kinds=LayerKind(layer),
        head=lambda shared, x, rows: (x * rows["weights"]).astype(dtype_of_total).sum(),
        count=lambda rows: 1,
    )
    ones = {
        name: jnp.full(WIDTH, name == "gain", jnp.float32) for name in ("gain", "bias", "inner")
    }
    layout = StageLayout((1, 1))
    table = jnp.ones((ENTRIES, WIDTH))
    params = {"embed_head": {"table": table}, "layers": layout.stack([ones, ones])}
    batch = {"inputs": jnp.asarray(tokens), "weights": jnp.asarray(weights, dtype)}
    built = build(schedule, pp=2, microbatches=len(tokens))
    mesh = make_mesh(2, devices=jax.devices()[:2])
    how = Execution(compute_dtype=dtype)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        pipeline = Pipeline(functions, built, mesh, layout.layers_per_stage, how)
        _, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
    return jax.tree.map(np.asarray, gradients)


@pytest.mark.extended(unless=["1f1b-*bfloat16*-4", "zb_h1-*float16*-4"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_sums_are_those_of_float64(schedule, dtype, microbatches):
    """To float32's rounding, though half of the tokens are equal and every term is positive."""
    random = np.random.default_rng(0)
    shape = (microbatches, 16 // microbatches, LENGTH)
    tokens = random.integers(0, ENTRIES, shape)
    tokens[random.random(shape) < 0.5] = 3
    # All terms have few bits, so that products are exact; one row's sum is above 65,504.
    weights = random.integers(1, 8, (*shape, WIDTH)) / 2
    got = looked_up(schedule, dtype, tokens, weights)
    want = np.zeros((ENTRIES, WIDTH))
    np.add.at(want, tokens, weights)
    total = weights.sum((0, 1, 2))
    scale = shape[0]  # of the mean: every microbatch counts one term
    assert want.max() > np.finfo(np.float16).max
    np.testing.assert_allclose(got["embed_head"]["table"] * scale, want, rtol=1e-6)
    for layer in got["layers"]:
        for name in ("gain", "bias"):
            np.testing.assert_allclose(
                layer[name] * scale, np.broadcast_to(total, (2, WIDTH)), rtol=1e-6
            )
        # A sum in a layer's own loop comes out in the compute dtype, rounded once.
        if dtype == jnp.bfloat16:
            inner = layer["inner"] * scale
            np.testing.assert_allclose(inner, np.broadcast_to(total, (2, WIDTH)), rtol=2**-8)
