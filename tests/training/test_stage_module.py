"""Stages of a configured model as modules: the same layers and numbers as the whole model's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.core.executor import step_ref
from jaxpipe.core.mesh import make_mesh
from jaxpipe.core.schedule import compute_layer_assignment
from jaxpipe.flax_models import Stage, build_pipeline_schedule, build_pipeline_stage
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.training.stage_module import build_stage_module

SIZES = {"n_layers": 4, "d_model": 8, "vocab_size": 16, "n_heads": 2, "d_ff": 16}
CONFIG = LlamaConfig(**SIZES, n_kv_heads=2)
KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("layers", "pp", "want"),
    [
        (32, 4, [(0, 8), (8, 16), (16, 24), (24, 32)]),
        (10, 3, [(0, 4), (4, 7), (7, 10)]),
        (7, 2, [(0, 4), (4, 7)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_layers_of_stages(layers, pp, want):
    assert compute_layer_assignment(layers, pp) == want


def stages(pp, microbatch=2):
    modules = [build_stage_module(CONFIG, rank, pp, KEY) for rank in range(pp)]
    x, built = jax.ShapeDtypeStruct((microbatch, 5), jnp.int32), []
    for module in modules:
        built.append(build_pipeline_stage(module, x))
        x = built[-1].y
    return built


def test_a_stage_has_its_layers_and_the_values_of_the_whole():
    made = [stage.module for stage in stages(3)]
    assert [list(stage.layers) for stage in made] == [["0", "1"], ["2"], ["3"]]
    assert [stage.embed is None for stage in made] == [False, True, True]
    assert [stage.head is None for stage in made] == [True, True, False]
    model = FAMILIES["llama"].build(CONFIG)
    got = nnx.to_pure_dict(nnx.state(made[1].layers["2"], nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, got, model.init_layer(KEY, 2, "layer"))
    ends = nnx.to_pure_dict(nnx.state((made[0].embed, made[2].head), nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, ends[0] | ends[1], model.init_embed_head(KEY))


def test_stages_in_a_pipeline_give_the_loss_of_the_model():
    """Layers of different stages are one kind, so that no rank stores slots for the others'."""
    tokens = jax.random.randint(KEY, (4, 2, 6), 0, CONFIG.vocab_size)
    batch = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}

    def loss(logits, targets):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)

    pipeline = build_pipeline_schedule(
        stages(2), 4, loss, "zb_h1", mesh=make_mesh(2, devices=jax.devices()[:2])
    )
    assert len(pipeline.pipeline.functions.kinds_by_name) == 1
    model = FAMILIES["llama"].build(CONFIG)
    layers = [model.init_layer(KEY, i, "layer") for i in range(4)]
    want = step_ref(model.functions, model.init_embed_head(KEY), layers, batch).losses.sum()
    np.testing.assert_allclose(pipeline.loss(batch), want, rtol=1e-6)


def refused(make, *names):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert [name for name in names if name not in str(error.value)] == []


def test_refusals():
    refused(lambda: build_stage_module(CONFIG, 2, 2), "pp_rank=2")
    refused(lambda: build_stage_module(CONFIG, 0, 5), "4 layers", "5 stages")
    refused(lambda: build_stage_module(GPT2Config(**SIZES, max_seq_len=8), 0, 2), "embedding")
    experts = {"n_experts": 4, "experts_per_token": 2}
    config = LlamaConfig(**SIZES, n_kv_heads=2, **experts)
    refused(lambda: build_stage_module(config, 0, 2), "experts")


def test_a_pipeline_needs_all_stages_in_order():
    mesh, built = make_mesh(2, devices=jax.devices()[:2]), stages(2)

    def pipeline(stages, schedule="1f1b"):
        return build_pipeline_schedule(stages, 4, jnp.subtract, schedule, mesh=mesh)

    refused(lambda: pipeline(built[::-1]), "order")
    refused(lambda: pipeline(built[:1]), "head")
    refused(lambda: pipeline(built, "zbv"), "2 entries", "4 entries")
    refused(lambda: pipeline([built[0], stages(2, microbatch=3)[1]]), "microbatch size")


def test_a_stage_of_all_layers_is_the_model():
    layers = {i: nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in (1, 0, 10)}
    x = jnp.ones((1, 2))
    want = layers[10](layers[1](layers[0](x)))
    np.testing.assert_array_equal(Stage(layers)(x), want)
