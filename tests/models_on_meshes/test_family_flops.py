"""FLOPs of the step with the layers of further families, against closed forms."""

import jax
import pytest
from meshes import EXAMPLES, LENGTH, MICROBATCHES, MODELS, pipeline_of
from oracles.decoder import head_flops
from oracles.families import gpt_oss_layer_flops, latent_layer_flops, prediction_flops
from oracles.flops import OpFlops
from programs import executed_flops

LAYERS = {
    "latent": [latent_layer_flops] * 4,
    "ahead": [latent_layer_flops] * 3 + [prediction_flops],
    "gpt_oss": [gpt_oss_layer_flops] * 4,
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("model", LAYERS)
def test_a_step_multiplies_what_the_sizes_say(model, schedule):
    """B and W together as much as BW; a look-up, of a token ahead too, multiplies nothing.

    One rank has all layers: a rank's slots for other kinds of layers are branches that it never
    takes, which `executed_flops` would count.
    """
    pipeline, _, *given = pipeline_of(model, schedule, 1, 1, 1)
    trace = jax.jit(pipeline.losses_and_gradients).trace(*given)
    got = executed_flops(trace, pipeline.tables, 0)
    sizes = {"batch": EXAMPLES, "seq_len": LENGTH}
    layers = [layer(MODELS[model], **sizes) for layer in LAYERS[model]]
    work = sum([*layers, head_flops(MODELS[model], **sizes)], OpFlops())
    assert got == MICROBATCHES * (work.F + work.backward)
