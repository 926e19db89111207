"""FLOPs, stored bytes and memory of the step of a mixture of experts, against closed forms."""

from math import prod

import jax
import numpy as np
import pytest
from commands import SMALL
from mixtures import EXAMPLES, LENGTH, MODELS, pipeline_of, problem
from oracles.decoder import head_flops
from oracles.mixture import expert_rows, sparse_layer_flops
from programs import executed_flops, find_scan

from jaxpipe import config as configs
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.training.trainer import Trainer

SPARSE = ["model.n_experts=8", "model.experts_per_token=2", "model.d_expert=32",
          "model.first_dense_layers=1", "train.grad_accum_steps=8"]  # fmt: skip


def shapes_of(pipeline, model, examples=EXAMPLES, length=LENGTH):
    """Return the shapes of a step's inputs, in float32."""
    _, shared, layers, _, variables = problem(model)
    layout = pipeline.layout(len(layers))
    params = jax.eval_shape(lambda: {"embed_head": shared, "layers": layout.stack(layers)})
    params, variables = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), (params, variables)
    )
    ids = jax.ShapeDtypeStruct((pipeline.schedule.microbatches, examples, length), np.int32)
    return params, {"inputs": ids, "targets": ids}, variables


@pytest.mark.slow(only=["qwen-1f1b-mesh0-none", "narrow-1f1b-mesh3-selective"])
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
    """Slots of a capacity count, full or not; B and W together count as much as BW."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("model", "remat"), [("qwen", "selective"), ("narrow", "full")])
def test_memory_is_flat_in_microbatches(model, remat):
    """Dropless experts and capacity slots, both sharded over two replicas; long rows dominate.

    XLA packs temporaries into one allocation, whose gaps depend on the size of the tables: the
    dropless step has 36 KB of gaps more with 12, 20, 24 or 40 microbatches than with 8, 16 or 32.
    Over 256 microbatches gaps are a small part of the bound, and what a step stores for each is
    not. At the fullest instant of its program a microbatch adds 124 bytes: integers of the tables,
    and its losses and counts.
    """
    length, config = 16 * LENGTH, MODELS[model]
    stream = 4 * EXAMPLES // 2 * length * config.d_model  # bytes on a device

    def temporaries(microbatches):
        pipeline = pipeline_of(model, "1f1b", 2, 2, 1, 2, microbatches=microbatches, remat=remat)
        given = shapes_of(pipeline, model, length=length)
        compiled = jax.jit(pipeline.step).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert (temporaries(8 + 256) - temporaries(8)) / 256 <= 0.02 * stream


@pytest.mark.slow(unless=["*parallel.ep=4*"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.dp=1", "train.remat=none"],
        ["parallel.dp=4", "parallel.ep=4", "model.capacity_factor=1.25", "train.remat=full"],
        ["parallel.dp=4", "parallel.ep=2", "parallel.schedule=zb_h1", "train.remat=selective",
         "train.compute_dtype=bfloat16"],
    ],
    ids=str,
)  # fmt: skip
def test_what_ticks_hand_on_is_what_a_plan_counts(overrides):
    """The scan's carry has ring buffers, messages and gradient sums, plus losses and counts."""
    config = configs.load(SMALL, [*SPARSE, "parallel.pp=2", *overrides])
    parallel = config.parallel
    trainer = Trainer.resolve(config, tuple(jax.devices()[: parallel.pp * parallel.dp]))
    batch = trainer.sharder.shapes(config.train.seq_len)
    trace = trainer.train_step.trace(trainer.state_shapes, batch)
    carried = find_scan(trace.jaxpr.jaxpr).params["jaxpr"].out_avals
    got = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in carried)
    planned = rank_bytes(config, trainer.layout, trainer.plan.buffers)
    layers, experts = len(config.model.sparse_layers), config.model.n_experts
    counted = 4 * (config.train.grad_accum_steps + layers * (experts + 2))
    assert got == planned.activations + planned.gradients + counted
