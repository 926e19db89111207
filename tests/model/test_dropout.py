"""Dropout: the same masks on every layout, otherwise independent, none in held-out losses."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from compare import assert_same
from meshes import MODELS, problem, run, without_key_biases

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.model.layers.dropout import Dropout, Masks
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer


@pytest.mark.extended
@pytest.mark.slow(unless=["dropping-zb_h1-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("dropping", "1f1b", (2, 2, 2), {"sequence": True}),
        ("dropping", "zb_h1", (4, 1, 2), {"remat": "full"}),
        ("dropping", "dualpipe", (2, 4, 1), {"remat": "selective"}),
        ("dropping", "1f1b", (2, 2, 1), {"slices": 4}),
        ("dropping", "1f1b", (2, 4, 1), {"cp": 2}),
        ("gpt2_dropping", "interleaved_1f1b", (2, 1, 2), {}),
    ],
)
def test_any_layout_drops_what_one_device_does(model, schedule, mesh, how):
    with jax.enable_x64(True):
        got, want = run(model, schedule, *mesh, dtype=jnp.float64, **how)
        if model == "gpt2_dropping":
            got, want = without_key_biases(got), without_key_biases(want)
        assert_same(got, want)


def test_held_out_batches_drop_nothing():
    decoder, shared, _, batch = problem("dropping", jnp.float32)
    plain = problem("grouped", jnp.float32)[0]
    rows = {name: leaf[0] for name, leaf in batch.items()}
    held_out = {name: leaf for name, leaf in rows.items() if name != "samples"}
    dropped, kept, want = (
        functions.embed(shared, given)
        for functions, given in ((decoder, rows), (decoder, held_out), (plain, held_out))
    )
    np.testing.assert_array_equal(kept, want)
    assert 0.2 < (dropped == 0).mean() < 0.4


def masks(layer=3, samples=(7, 8), seed=1, begin=0, own=64):
    dropout = Dropout(0.25, 0.25, seed)
    return Masks.of(dropout, jnp.array(samples), layer, begin + jnp.arange(own), ONE_DEVICE)


ONES = jnp.ones((2, 64, 96))


def test_a_share_of_values_is_dropped_and_the_mean_stays():
    for kept in (masks().stream(ONES, "mlp"), masks().shares(ONES[:, None])):
        assert abs((kept == 0).mean() - 0.25) < 0.02
        assert abs(kept.mean() - 1) < 0.03
        np.testing.assert_allclose(np.unique(kept), [0, 1 / 0.75], rtol=1e-6)


def test_masks_differ_by_seed_sample_layer_and_site():
    one = masks().stream(ONES, "mlp")[0]
    found = [
        one,
        masks().stream(ONES, "mlp")[1],
        masks().stream(ONES, "attention")[0],
        masks(layer=4).stream(ONES, "mlp")[0],
        masks(seed=2).stream(ONES, "mlp")[0],
        masks(begin=64).stream(ONES, "mlp")[0],
        masks().shares(ONES[:, None])[0, 0],
        masks().shares(jnp.ones((2, 2, 64, 96)))[0, 1],
    ]
    for left, right in combinations(found, 2):
        agree = ((left == 0) == (right == 0)).mean()
        assert abs(agree - (0.25**2 + 0.75**2)) < 0.03  # as for independent masks


def test_part_of_a_sequence_has_the_masks_of_the_whole():
    whole = masks().stream(ONES, "mlp")
    np.testing.assert_array_equal(
        masks(begin=16, own=48).stream(ONES[:, 16:], "mlp"), whole[:, 16:]
    )
    shares = masks().shares(ONES[:, None])
    part = masks(begin=8).shares(ONES[:, None, 24:, 32:], query=16, key=32)
    np.testing.assert_array_equal(part, shares[:, :, 24:, 32:])


LAYOUTS = [
    "parallel.pp=1 parallel.dp=1 train.microbatch_size=2",
    "parallel.pp=2 parallel.dp=2 parallel.tp=2 parallel.schedule=zb_h1",
    "parallel.pp=4 parallel.dp=1 train.microbatch_size=2 parallel.schedule=zbv",
    "parallel.pp=4 parallel.dp=2 parallel.schedule=1f1b",
]


@pytest.mark.slow
def test_steps_drop_the_same_on_every_layout():
    """Losses of three steps, and a held-out loss after them."""
    found = []
    for layout in LAYOUTS:
        overrides = [
            *layout.split(),
            "model.n_layers=8",
            "model.dropout=0.2",
            "model.attention_dropout=0.1",
        ]
        config = configs.load(SMALL, [*overrides, "optimizer.lr=1e-2"])
        parallel = config.parallel
        trainer = Trainer.resolve(config, jax.devices()[: parallel.devices])
        state, losses = trainer.init(), []
        ids = np.random.default_rng(0).integers(0, 256, (4, 2, 33)).astype(np.int32)
        batch = {"inputs": ids[..., :-1], "targets": ids[..., 1:]}
        for position in (0, 8, 16):
            state, metrics = trainer.train_step(state, trainer.put(batch, position))
            losses.append(float(metrics["loss"]))
        found.append([*losses, float(trainer.eval_step(state, trainer.put(batch))[0])])
    np.testing.assert_allclose(found[1:], [found[0]] * (len(LAYOUTS) - 1), rtol=1e-6)
    assert found[0][3] < min(found[0][:3])  # without dropout


def test_shares_that_a_kernel_keeps_to_itself_cannot_be_dropped():
    given = ["model.attention=cudnn", "model.attention_dropout=0.1"]
    with pytest.raises(ConfigError, match="attention_dropout=0.1 drops shares that the kernel"):
        check_settings(configs.load(SMALL, given))


def test_all_cannot_be_dropped():
    with pytest.raises(ConfigError, match="model.dropout: expected `float` < 1.0, got 1.0"):
        configs.load(SMALL, ["model.dropout=1.0"])


def test_models_without_dropout_need_no_numbers():
    assert "samples" not in problem("grouped", jnp.float32)[0].functions.batch_keys
    assert MODELS["grouped"].dropout == 0


@pytest.mark.parametrize("rate", ["model.dropout=0.1", "model.attention_dropout=0.1",
                                  "lora.rank=2 lora.dropout=0.1"])  # fmt: skip
@pytest.mark.parametrize("fused", [1, 2])
def test_steps_with_dropout_need_the_numbers_of_samples(rate, fused):
    """And an evaluation, or scores, have none."""
    config = configs.load(SMALL, [*rate.split(), f"train.fused_steps={fused}", "parallel.pp=2"])
    trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
    numbered, plain = (trainer.put(random_batch(config), *at) for at in ((0,), ()))
    steps = trainer.train_step if fused == 1 else FusedSteps(trainer).train_steps
    with pytest.raises(ConfigError, match="has only inputs, targets: give the number of its first"):
        steps.lower(trainer.state_shapes, plain)
    with pytest.raises(ConfigError, match="an evaluation drops nothing, but the batch has samples"):
        trainer.eval_step.lower(trainer.state_shapes, numbered)
    batch = random_batch(config) | {"samples": np.asarray(numbered["samples"])}
    with pytest.raises(ConfigError, match="an evaluation drops nothing, but the batch has samples"):
        BatchScores(trainer)(trainer.state_shapes.params, batch)
    np.testing.assert_array_equal(trainer.put(batch)["samples"], numbered["samples"])
