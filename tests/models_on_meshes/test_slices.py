"""Sequences in slices, each with its own forward and backward passes, against full sequences."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from meshes import EXAMPLES, LENGTH, MODELS, pipeline_of, problem, run, wanted

from jaxpipe.core.contract import LayerKind
from jaxpipe.core.executor import losses_and_gradients_ref
from jaxpipe.core.mesh import shard_batch
from jaxpipe.core.schedule import Lockstep
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.options import Sharing


def check(*args, **how):
    with jax.enable_x64(True):
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.slow(only=["one_kv"])
@pytest.mark.parametrize("model", ["grouped", "one_kv"])
def test_the_reference_in_slices_is_the_reference(model):
    with jax.enable_x64(True):
        _, shared, layers, batch = problem(model, jnp.float64)
        functions = LlamaDecoder(MODELS[model], Sharing(slices=4)).functions
        batch = shard_batch(batch, slices=4, cp=1, dp=1)
        losses, gradients = losses_and_gradients_ref(functions, shared, layers, batch, slices=4)
        want, want_gradients = wanted(model, jnp.float64)
        assert_same((losses.reshape(-1, 4).sum(1), gradients), (want, want_gradients))


@pytest.mark.slow(unless=["interleaved_zb-2"])
@pytest.mark.parametrize(
    ("schedule", "pp"),
    [("gpipe", 2), ("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("bfs", 2), ("zb_h1", 4),
     ("zb_h2", 2), ("interleaved_zb", 2)],
)  # fmt: skip
def test_schedules_of_slices(schedule, pp):
    check("grouped", schedule, pp, 1, 1, slices=4, poison_bubbles=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2), (2, 1, 4), (2, 4, 1)])
def test_slices_on_meshes(mesh):
    cp = {1: 1, 2: 2, 4: 2}[mesh[1]]
    check("one_kv", "zb_h1", *mesh, cp=cp, slices=2, sequence=mesh[2] == 2, zero_stage=2)


@pytest.mark.slow(unless=["*cp*slices*"])
@pytest.mark.parametrize(
    "how", [{"cp": 2}, {"slices": 4}, {"cp": 2, "slices": 2, "remat": "full"}], ids=str
)
def test_a_window_reaches_across_slices_and_shards(how):
    """With a window of three tokens, which starts in the previous shard."""
    check("windowed", "zb_h1", 2, 2, 2, sequence=True, **how)


@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_slices_of_layers_that_every_action_gathers(schedule):
    how = {"zero_stage": 3, "reshard_after_forward": True}
    check("grouped", schedule, 2, 2, 2, slices=2, sequence=True, **how)


@pytest.mark.slow(unless=["zb_h1-*defer_embed_head=True*", "interleaved_1f1b-*in_flight=20*"])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("zb_h1", {"remat": "full"}),
        ("interleaved_1f1b", {"remat": "selective"}),
        ("interleaved_1f1b", {"loss_chunks": 2}),
        ("zb_h1", {"lockstep": Lockstep(defer_embed_head=True)}),
        ("interleaved_1f1b", {"lockstep": Lockstep(vocab_parallel=True)}),
        ("zb_h1", {"lockstep": Lockstep(vocab_parallel=True)}),
        ("interleaved_1f1b", {"lockstep": Lockstep(transfer_ticks=2)}),
        ("zb_h1", {"lockstep": Lockstep(in_flight=6)}),
        # a round of two microbatches in two slices for each of two chunks
        ("interleaved_1f1b", {"lockstep": Lockstep(in_flight=20)}),
    ],
    ids=str,
)
def test_slices_however_they_are_run(schedule, how):
    check("normed", schedule, 2, 1, 1, slices=2, **how)


def test_evaluation_in_slices():
    pipeline, _, params, batch = pipeline_of("normed", "1f1b", 2, 1, 1, slices=4)
    losses = jax.jit(pipeline.losses)(params, batch)
    trained, _ = jax.jit(pipeline.losses_and_gradients)(params, batch)
    np.testing.assert_allclose(losses, trained, rtol=1e-6)


def test_only_functions_with_a_state_run_in_slices():
    pipeline, _, params, batch = pipeline_of("normed", "1f1b", 2, 1, 1, slices=2)
    (kind,) = pipeline.functions.kinds_by_name.values()
    stateless = replace(pipeline.functions, kinds=LayerKind(kind.layer))
    whole = replace(pipeline, functions=stateless)
    with pytest.raises(ValueError, match="the functions need a state if, and only if"):
        whole.losses(params, batch)


@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_no_ring_of_slices_is_copied_in_the_loop(schedule):
    """Keys and values, and their gradients, are written into their slots in place."""
    pipeline, _, params, batch = pipeline_of("normed", schedule, 2, 1, 1, slices=4)
    slots = pipeline.tables.slots
    step = jax.jit(pipeline.losses_and_gradients).lower(params, batch)
    text = step.compile().as_text()
    loop = text.replace(text[text.index("ENTRY") :], "")
    one = ",".join(map(str, (EXAMPLES, LENGTH, 4, 16)))
    assert f"f32[{slots.state},{one}]" in loop
    assert not re.findall(rf"\w+\[(?:{slots.state}|{slots.dstate}),{one}\]\S* copy\(", loop)
