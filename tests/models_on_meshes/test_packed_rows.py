"""Documents packed into rows on meshes, against each document alone on one device."""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import CAL_DIFF, assert_same, cal_diff
from meshes import ROWS, packed, pipeline_of, problem, rows_of, run, wanted, without_key_biases
from oracles import ragged

from jaxpipe.core.contract import Context
from jaxpipe.core.executor import losses_and_gradients_ref
from jaxpipe.core.schedule import Lockstep
from jaxpipe.schedules import BUILDERS, FAMILIES
from jaxpipe.schedules import build as schedule_of


def check(*args, **how):
    with jax.enable_x64(True):
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pp"), [*zip(BUILDERS, cycle((2, 4)))])
def test_schedules_of_packed_rows(schedule, pp):
    """On 2 ranks with layers and sequences shared, sequences also in slices where possible."""
    stages = schedule_of(schedule, pp=pp, microbatches=8).stages
    model, slices = (
        "packed_deep" if stages == 8 else "packed",
        FAMILIES[schedule].has_option("slices"),
    )
    if pp == 4:
        check(model, schedule, 4, 1, 1)
    else:
        check(model, schedule, 2, 2, 2, cp=2, slices=2 if slices else 1)


@pytest.mark.slow(unless=["packed-1f1b-(2, 2, 2)-*", "packed_gpt2-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("packed", "zb_h1", (2, 2, 2), {"sequence": True, "zero_stage": 2, "remat": "selective"}),
        ("packed", "1f1b", (2, 2, 2), {"cp": 2, "slices": 2, "remat": "full"}),
        ("packed_windowed", "zb_h1", (4, 1, 2), {"slices": 4, "zero_stage": 0}),
        ("packed", "1f1b", (2, 4, 1), {"zero_stage": 3, "reshard_after_forward": True, "cp": 4}),
        ("packed", "dualpipe", (2, 1, 2), {"lockstep": Lockstep(vocab_parallel=True)}),
        ("packed_gpt2", "interleaved_1f1b", (2, 2, 2), {"cp": 2, "loss_chunks": 2}),
    ],
    ids=str,
)
def test_packed_rows_on_meshes(model, schedule, mesh, how):
    with jax.enable_x64(True):
        got, want = run(model, schedule, *mesh, dtype=jnp.float64, **how)
        if model == "packed_gpt2":
            got, want = without_key_biases(got), without_key_biases(want)
        assert_same(got, want)


@pytest.mark.slow(
    unless=["zb_h1-(2, 2, 2)-{'cp': 2, 'slices': 2, 'sequence': True, 'remat': 'full'}"]
)
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("dualpipe", (4, 1, 2), {"remat": "selective"}),
        ("zb_h1", (2, 2, 2), {"cp": 2, "slices": 2, "sequence": True, "remat": "full"}),
    ],
    ids=str,
)
def test_the_fused_kernel_in_a_pipeline(schedule, mesh, how, monkeypatch):
    """Its operands, split into F, B and W; plain products replace cuDNN itself."""
    ragged.stands_in(monkeypatch)
    check("packed_fused", schedule, *mesh, **how)


def test_the_reference_is_of_documents_and_nothing_else():
    """The documents of one row, in arrays of their own length."""
    with jax.enable_x64(True):
        decoder, shared, layers, batch = problem("packed", jnp.float64)
        _, _, _, plain = problem("grouped", jnp.float64)
        functions = problem("grouped", jnp.float64)[0].functions
        few = {name: leaf[:1, :1] for name, leaf in batch.items()}
        losses, gradients = losses_and_gradients_ref(decoder.functions, shared, layers, few)
        terms, total = decoder.functions.count({n: leaf[0] for n, leaf in few.items()}), 0
        summed = jax.tree.map(jnp.zeros_like, gradients)
        lengths = rows_of(batch)[0][0]
        for length, end in zip(lengths, np.cumsum(lengths)):
            own = {name: leaf[:1, :1, end - length : end] for name, leaf in plain.items()}
            own["targets"] = jnp.asarray(own["targets"]).at[..., -1].set(-100)
            share = functions.count({name: leaf[0] for name, leaf in own.items()}) / terms
            loss, gradient = losses_and_gradients_ref(functions, shared, layers, own)
            total += loss.sum() * share
            summed = jax.tree.map(lambda s, g, w=share: s + g * w, summed, gradient)
        assert_same((losses.sum(), gradients), (total, summed))


@pytest.mark.parametrize("model", ["packed", "packed_fused", "packed_gpt2"])
def test_a_documents_loss_has_no_gradient_at_another(model, monkeypatch):
    """At embeddings, through all layers, it is exactly zero; at its own tokens it is not."""
    ragged.stands_in(monkeypatch)
    decoder, shared, layers, batch = problem(model, jnp.float32)
    rows = {name: leaf[0] for name, leaf in batch.items()}
    own = rows["segments"] == 1

    def loss(x):
        for index, layer in enumerate(layers):
            x = decoder.layer(layer, x, Context(rows, jnp.int32(index))).y
        return decoder.head(shared, x, rows | {"targets": jnp.where(own, 1, -100)})

    gradient = jax.jit(jax.grad(loss))(decoder.embed(shared, rows))
    assert own.any(axis=1).sum() > 1
    assert ((gradient != 0).any(axis=2) == own).all()


def test_metadata_of_another_microbatch_is_seen():
    """A planted fault: two microbatches have each other's documents."""
    with jax.enable_x64(True):
        pipeline, layout, params, batch = pipeline_of("packed", "1f1b", 2, 1, 1, dtype=jnp.float64)
        step = jax.jit(pipeline.losses_and_gradients)
        want_losses, want = wanted("packed", jnp.float64)
        want = want | {"layers": layout.stack(want["layers"])}
        assert_same(step(params, batch), (want_losses, want))
        other = jnp.array([0, 1, 3, 2, 4, 5, 6, 7])
        swapped = batch | {name: batch[name][other] for name in ("segments", "positions")}
        losses, got = step(params, swapped)
        assert cal_diff(losses[2:4], want_losses[2:4]) > CAL_DIFF
        with pytest.raises(AssertionError):
            assert_same(got, want)


def test_padding_changes_nothing():
    """Other tokens in padding: bitwise equal losses and gradients."""
    pipeline, _, params, batch = pipeline_of("packed", "zb_h1", 2, 1, 1)
    padding = batch["segments"] < 0
    assert padding.any(axis=(1, 2)).all()
    step = jax.jit(pipeline.losses_and_gradients)
    found = step(params, batch)
    other = batch | {
        "inputs": jnp.where(padding, (batch["inputs"] + 7) % 40, batch["inputs"]),
        "positions": jnp.where(padding, 5, batch["positions"]),
    }
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, step(params, other)))


def test_a_models_rows_must_tell_their_documents():
    pipeline, _, params, batch = pipeline_of("packed", "1f1b", 2, 1, 1)
    del batch["segments"]
    with pytest.raises(ValueError, match="built for packed rows, .* but the batch has only inputs"):
        jax.eval_shape(pipeline.losses, params, batch)
    pipeline, _, params, plain = pipeline_of("grouped", "1f1b", 2, 1, 1)
    with pytest.raises(ValueError, match="a leaf 'segments' that the model does not read"):
        jax.eval_shape(pipeline.losses, params, packed(plain))
    assert max(map(sum, ROWS)) == plain["inputs"].shape[2]
