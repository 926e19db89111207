"""A decoder's layers that read embedding and head (`LayerKind.reads`), against one device.

They call the decoder's own embedding and head, which tensor-parallel devices share.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import MODELS, packing_of, pipeline_of, problem
from programs import eqns_of

from jaxpipe.core.contract import Aux, LayerOutput
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.executor import step_ref
from jaxpipe.core.mesh import TensorParallel
from jaxpipe.core.schedule import Lockstep
from jaxpipe.model import FAMILIES
from jaxpipe.model.options import Sharing

READS = ("embed_head",)


def reading(kind, ends):
    """A decoder's layer that adds the embedding of its tokens, and makes the head's loss of y."""

    def layer(params, x, context):
        made = kind.layer(params, x, context)
        y = made.y + 0.3 * ends.embed(context.embed_head, context.rows)
        loss = ends.head(context.embed_head, y, context.rows).sum()
        return LayerOutput(y, made.state, Aux({"early": (0.1 * loss, context.rows["inputs"].size)}))

    return replace(kind, layer=layer, reads=READS)


def with_readers(functions, ends, layers):
    ((name, kind),) = functions.kinds_by_name.items()
    order = tuple("reader" if i in (layers // 2 - 1, layers - 1) else name for i in range(layers))
    kinds = {name: kind, "reader": reading(kind, ends)}
    return replace(functions, kinds=kinds, order=order)


def check_decoder(model, schedule, pp, dp, tp, *, sequence=False, **how):
    """Reading layers see embedding and head as the tp devices of one pipeline rank share them."""
    with jax.enable_x64(True):
        pipeline, layout, params, batch = pipeline_of(
            model, schedule, pp, dp, tp, dtype=jnp.float64, sequence=sequence, **how
        )
        config = MODELS[model]
        devices = TensorParallel(tp, sequence) if tp > 1 else ONE_DEVICE
        how = {"sharing": Sharing(devices), "ops": packing_of(model)}
        ends = FAMILIES[config.family].build(config, **how).functions
        functions = with_readers(pipeline.functions, ends, layout.layers)
        alone, shared, layers, batch_of_one = problem(model, jnp.float64)
        layout = replace(layout, kinds=functions.order)
        params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
        pipeline = replace(pipeline, functions=functions)
        got = jax.jit(pipeline.step)(params, batch)
        one = with_readers(alone.functions, alone.functions, len(layers))
        want = step_ref(one, shared, layers, batch_of_one)
        staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
        assert_same(
            (got.losses, got.aux_losses, got.gradients),
            (want.losses, want.aux_losses, pipeline.sharding.pad(staged)),
        )


SHARED = Lockstep(vocab_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "zero_stage"),
    [
        ("tied", "zb_h1", (2, 2, 2), 1),
        ("tied", "1f1b", (4, 2, 1), 0),
        ("grouped", "zb_h1", (4, 1, 2), 3),
        ("grouped", "1f1b", (2, 2, 2), 0),
        ("deep", "zbv", (2, 2, 2), 3),
        ("deep", "dualpipe", (2, 2, 2), 0),
        ("uneven", "1f1b", (2, 2, 1), 1),
        ("uneven", "1f1b", (4, 1, 2), 1),
        ("normed", "zb_h1", (2, 2, 2), 1),
    ],
    ids=str,
)
def test_a_vocabulary_that_pipeline_ranks_share(model, schedule, mesh, zero_stage):
    sequence = mesh[2] > 1
    how = {"zero_stage": zero_stage, "lockstep": SHARED, "poison_bubbles": True}
    check_decoder(model, schedule, *mesh, sequence=sequence, **how)


@pytest.mark.slow(unless=["tied-zb_h1-(2, 1, 2)-0"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "zero_stage"),
    [
        ("tied", "zb_h1", (2, 1, 2), 0),
        ("grouped", "1f1b", (2, 2, 2), 1),
        ("deep", "zbv", (2, 2, 2), 3),
    ],
    ids=str,
)
def test_devices_that_share_layers(model, schedule, mesh, zero_stage):
    check_decoder(model, schedule, *mesh, sequence=True, zero_stage=zero_stage)


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [Lockstep(), SHARED], ids=["apart", "shared"])
def test_replicas_that_share_sequences(lockstep):
    check_decoder("grouped", "zb_h1", 2, 2, 1, cp=2, zero_stage=1, lockstep=lockstep)


@pytest.mark.parametrize("lockstep", [Lockstep(), SHARED], ids=["apart", "shared"])
def test_where_no_layer_reads_nothing_is_gathered_or_summed(lockstep):
    """With a reading layer the ranks that share a vocabulary gather all of it, and else nowhere."""
    pipeline, layout, params, batch = pipeline_of("grouped", "1f1b", 2, 1, 1, lockstep=lockstep)
    size = MODELS["grouped"].vocab_size

    def whole(pipeline):
        trace = jax.make_jaxpr(pipeline.losses_and_gradients)(params, batch)
        (inside,) = [eqn for eqn, _ in eqns_of(trace.jaxpr) if eqn.primitive.name == "shard_map"]
        values = [var for eqn, _ in eqns_of(inside.params["jaxpr"]) for var in eqn.outvars]
        return any(size in var.aval.shape for var in values)

    assert whole(pipeline) is not lockstep.vocab_parallel
    ends = FAMILIES["llama"].build(MODELS["grouped"]).functions
    functions = with_readers(pipeline.functions, ends, layout.layers)
    assert whole(replace(pipeline, functions=functions))
