"""What the step of a mixture of experts executes, stores and needs, against closed forms."""

import jax
import numpy as np
import pytest
from mixtures import EXAMPLES, LENGTH, MODELS, pipeline_of, problem
from oracles.decoder import head_flops
from oracles.mixture import expert_rows, sparse_layer_flops
from programs import executed_flops


def shapes_of(pipeline, model, examples=EXAMPLES, length=LENGTH):
    """What a step is given, in float32 and without values."""
    _, shared, layers, _, variables = problem(model)
    layout = pipeline.layout(len(layers))
    params = jax.eval_shape(lambda: {"shared": shared, "layers": layout.stack(layers)})
    params, variables = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), (params, variables)
    )
    ids = jax.ShapeDtypeStruct((pipeline.schedule.microbatches, examples, length), np.int32)
    return params, {"inputs": ids, "targets": ids}, variables


@pytest.mark.parametrize(
    ("model", "name", "mesh", "remat"),
    [
        ("qwen", "1f1b", (2, 1, 1, 1), "none"),
        ("qwen", "zb_h1", (2, 1, 1, 1), "full"),
        ("narrow", "zb_h1", (2, 2, 1, 2), "full"),
        ("narrow", "1f1b", (2, 2, 1, 2), "selective"),
        ("narrow", "dualpipev", (2, 4, 1, 4), "none"),
    ],
)
def test_a_step_executes_active_experts_alone(model, name, mesh, remat):
    """With the slots of a capacity, full or not; as many in B and W as in both at once."""
    pipeline, config = pipeline_of(model, name, *mesh, remat=remat), MODELS[model]
    trace = jax.jit(pipeline.step).trace(*shapes_of(pipeline, model))
    ranks, replicas, _, ep = mesh
    got = sum(executed_flops(trace, pipeline.tables, rank) for rank in range(ranks))
    sizes = {"batch": EXAMPLES // replicas, "seq_len": LENGTH}
    layer = sparse_layer_flops(config, **sizes, remat=remat, ep=ep)
    work = sum([layer] * config.n_layers, head_flops(config, **sizes))
    assert got == pipeline.schedule.microbatches * (work.F + work.B + work.W)
    active = EXAMPLES // replicas * LENGTH * config.experts_per_token
    assert expert_rows(config, **sizes, ep=ep) == active * (config.capacity_factor or 1)
