"""Multi-token prediction: its formula, and the pipeline on meshes against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from meshes import MODELS, problem, run

from jaxpipe.core.contract import Aux, Context
from jaxpipe.core.executor import step_ref
from jaxpipe.core.schedule import Lockstep
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.neighbours import ahead_keys, rows_ahead


def norm(x, scale, eps=1e-6):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale[None, None]


def formula(decoder, shared, layers, batch):
    """Return the mean loss and the sum of all depths' mean losses, microbatch by microbatch.

    It rolls tokens by the paper's indices; blocks are the decoder's own layers.
    """
    config, total, ahead = decoder.config, 0.0, [0.0] * decoder.config.mtp_depth
    head = shared["embed"].T if config.tie_embeddings else shared["head"]
    for inputs, targets in zip(batch["inputs"], batch["targets"]):
        rows, x = {"inputs": inputs, "targets": targets}, shared["embed"][inputs]
        tokens = jnp.concatenate([inputs, targets[:, -1:]], axis=1)  # t_0 .. t_L, none is ignored
        for i, params in enumerate(layers[:-1]):
            x = decoder.layer(params, x, Context(rows, jnp.int32(i)), "layer").y

        def loss(h, k, tokens=tokens, valid=targets != IGNORE):
            logits = jax.nn.log_softmax(h @ head)
            length = logits.shape[1] - k
            chosen = jnp.take_along_axis(logits[:, :length], tokens[:, 1 + k :, None], 2)[..., 0]
            return -jnp.where(valid[:, k:], chosen, 0).sum()

        h, length = norm(x, shared["final_norm"]["scale"]), x.shape[1]
        total += loss(h, 0)
        for k in range(1, config.mtp_depth + 1):
            own = layers[-1][f"depth_{k - 1}"]
            at = jnp.minimum(jnp.arange(length) + k, length - 1)
            token = norm(shared["embed"][inputs[:, at]], own["token_norm"]["scale"])
            both = jnp.concatenate([token, norm(h, own["stream_norm"]["scale"])], axis=-1)
            y = decoder.layer(own["block"], both @ own["merge"], Context(rows, jnp.int32(0))).y
            h = norm(y, own["norm"]["scale"])
            ahead[k - 1] += loss(h, k)
    valid = batch["targets"] != IGNORE
    means = [of_depth / valid[..., k:].sum() for k, of_depth in enumerate(ahead, start=1)]
    return total / valid.sum(), sum(means)


@pytest.mark.extended
@pytest.mark.slow(only=["1"])
@pytest.mark.parametrize("depth", [1, 2])
@jax.enable_x64(True)
def test_the_formula_of_the_paper(depth):
    """Loss and every gradient; the weight is of the mean over depths."""
    decoder, shared, layers, batch = problem("ahead" if depth == 1 else "deeper", jnp.float64)
    batch = {name: leaf[:2, :2] for name, leaf in batch.items()}
    tokens = np.asarray(batch["inputs"])  # without targets that are ignored in the middle
    batch["targets"] = jnp.concatenate([tokens[..., 1:], np.full_like(tokens[..., :1], 3)], -1)
    batch |= rows_ahead(jax.tree.map(np.asarray, batch), depth)
    weight = decoder.config.mtp_weight / depth

    def total(given):
        loss, ahead = formula(decoder, *given, batch)
        return loss + weight * ahead, (loss, ahead)

    (_, (loss, ahead)), want = jax.value_and_grad(total, has_aux=True)((shared, layers))
    got = step_ref(decoder.functions, shared, layers, batch)
    gradients = got.gradients["embed_head"], got.gradients["layers"]
    found = got.losses.sum(), got.aux_losses.sum(), *gradients
    assert_same(found, (loss, weight * ahead, *want))
    logged = decoder.functions.report(got.aux)["mtp_loss"]
    np.testing.assert_allclose(logged, ahead / depth, rtol=1e-12)


@jax.enable_x64(True)
def test_no_gradient_crosses_documents():
    """It is exactly 0 at the embeddings of tokens that only other documents have."""
    decoder, shared, layers, _ = problem("ahead", jnp.float64)
    decoder = decoder.with_options(ops={"documents": 3})
    segments = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    rows = {
        "inputs": np.arange(8),  # every token has its own embedding
        "targets": np.where(segments == 1, np.arange(1, 9), IGNORE),
        "segments": segments,
        "positions": np.array([0, 1, 2, 0, 1, 2, 3, 0]),
    }
    rows["targets"][6] = IGNORE  # the last token of the document
    rows |= rows_ahead(rows, 1)
    got = step_ref(decoder.functions, shared, layers, jax.tree.map(lambda x: x[None, None], rows))
    of_tokens = np.abs(got.gradients["embed_head"]["embed"][:8]).sum(1)
    assert got.aux_losses.sum() > 0
    assert np.flatnonzero(of_tokens).tolist() == [3, 4, 5]  # the last token only ends a document


SHARED = Lockstep(vocab_parallel=True)


@pytest.mark.extended
@pytest.mark.slow(unless=["ahead-zb_h1-(2, 2, 2)-*", "packed_ahead-1f1b-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("ahead", "zb_h1", (2, 2, 2), {"sequence": True, "cp": 2, "heads": 1, "slices": 2}),
        ("packed_ahead", "1f1b", (2, 2, 2), {"cp": 2, "lockstep": SHARED, "remat": "full"}),
        ("ahead", "dualpipe", (2, 2, 1), {"zero_stage": 2, "loss_chunks": 2}),
        ("packed_ahead", "zb_h1", (4, 1, 2), {"sequence": True, "slices": 4, "zero_stage": 3}),
        ("ahead", "interleaved_1f1b", (2, 2, 2), {"z_loss": 0.01, "poison_bubbles": True}),
    ],
    ids=str,
)
def test_on_meshes(model, schedule, mesh, how):
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, dtype=jnp.float64, **how))


def test_rows_ahead_stay_in_their_document_and_row():
    batch = {"inputs": np.arange(8).reshape(2, 4), "targets": np.arange(1, 9).reshape(2, 4)}
    batch["segments"] = np.array([[0, 0, 1, 1], [0, 0, 0, -1]])
    found = rows_ahead(batch, 2)
    assert tuple(found) == ahead_keys(2)
    none = IGNORE
    assert found["inputs_ahead_1"].tolist() == [[1, 0, 3, 0], [5, 6, 0, 0]]
    assert found["targets_ahead_1"].tolist() == [[2, none, 4, none], [6, 7, none, none]]
    assert found["inputs_ahead_2"].tolist() == [[0, 0, 0, 0], [6, 0, 0, 0]]
    assert found["targets_ahead_2"].tolist() == [[none] * 4, [7, none, none, none]]


def test_without_rows_ahead_the_layer_returns_its_input():
    """As in generation, where the state of all layers goes on."""
    decoder, _, layers, batch = problem("ahead", jnp.float32)
    x, context = jnp.ones((1, 8, 32)), Context({"inputs": batch["inputs"][0, :1]}, jnp.int32(3), 7)
    assert decoder.layer(layers[-1], x, context, "prediction") == (x, 7, Aux())


def test_models_here_predict():
    assert MODELS["ahead"].layer_kinds == ("layer",) * 3 + ("prediction",)
