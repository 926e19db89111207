"""A loss of one's own: what it reads, and what is refused."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.lab.verification.observed import compare
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer

HOME = Path(__file__).parents[2]
MODULE = """
import jax.numpy as jnp


def loss(logprobs, rows):
    ratio, gain = jnp.exp(logprobs - rows["old_logprobs"]), rows["advantages"]
    clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    counts = rows["targets"] != -100
    return -jnp.where(counts, clipped, 0).sum(), counts.sum()
"""
SMALLER = (
    "parallel.pp=2", "parallel.dp=2", "model.d_model=32", "model.n_layers=2", "train.seq_len=16",
    "train.grad_accum_steps=4", "train.microbatch_size=4", "parallel.schedule=zb_h1",
    "runtime.cpu_devices=4",
)  # fmt: skip
ROWS = 'train.loss_rows=["advantages", "old_logprobs"]'
EXPERTS = ("model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of losses; return a function that loads a configuration with one of them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grpo", raising=False)

    def with_loss(text, *overrides):
        (tmp_path / "grpo.py").write_text(text)
        return load("configs/quickstart.toml", ["train.loss=grpo:loss", *overrides])

    return with_loss


def load(path, overrides):
    config = configs.load(HOME / path, [*SMALLER, *overrides])
    check_settings(config)
    return config


@pytest.mark.extended
def test_a_step_that_replays_routes_equals_one_device(module):
    """Experts chosen by an older policy, and the loss of advantages and old log-probabilities."""
    with jax.enable_x64(True):
        steps = Verification(module(MODULE, ROWS, *EXPERTS), say=lambda text: None)
        trainer, batch, score = steps.trainer, steps.batches[0], BatchScores(steps.trainer)
        older = trainer.init()
        own = score.record_routes(steps.begin.params, batch, steps.begin.variables)
        batch = score.record_routes(older.params, batch, older.variables)
        assert (batch["routes"] != own["routes"]).any()
        _, got = trainer.observe(steps.begin, trainer.put(batch))
        _, want = steps.reference.observe(steps.reference.init(), batch, 0)
        assert max(one.error for one in compare(got, want)) < 1e-12


@pytest.mark.extended
def test_routes_are_recorded_in_the_order_of_the_batch():
    """Of sequence shards and slices, and with adapters."""
    more = ("lora.rank=2", "parallel.cp=2", "parallel.slices=2", "parallel.schedule=1f1b")
    other = ("parallel.dp=1", "parallel.cp=1", "parallel.slices=1", "runtime.cpu_devices=2")
    found = []
    for overrides in (more, (*more, *other)):
        config = load("configs/quickstart.toml", [*EXPERTS, *overrides])
        trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
        state, batch = trainer.init(), random_batch(config)
        found.append(BatchScores(trainer).record_routes(state.params, batch)["routes"])
    np.testing.assert_array_equal(*found)
    assert found[0].shape == (4, 4, 16, 2, 2)
    batch["inputs"] = np.where(np.arange(4)[:, None] == 1, 7, batch["inputs"]).astype(np.int32)
    other = BatchScores(trainer).record_routes(state.params, batch)["routes"]
    differs = (other != found[1]).any(axis=(0, 2, 3, 4))
    np.testing.assert_array_equal(differs, np.arange(4) == 1)  # of the row that changed, alone


DISTILL = """
import jax.numpy as jnp

def loss(logprobs, rows, *, entropy, choice_logprobs):
    gap = jnp.exp(rows["teacher"]) * (rows["teacher"] - choice_logprobs)
    total = (gap.sum(-1) - 0.1 * entropy - rows["gain"] * logprobs).sum()
    return total, jnp.sum(rows["targets"] != -100), {"entropy": entropy.sum()}
"""
CHOICES = 'train.loss_rows=["gain", "choices[3]", "teacher[3]"]'
MESHES = {
    "vocabulary over all": ("parallel.dp=1", "parallel.tp=2", "parallel.vocab_parallel_pp=true"),
    "chunks": ("parallel.tp=1", "train.loss_chunks=4", "parallel.zero_stage=2"),
}


@pytest.mark.extended
@pytest.mark.slow(unless=["chunks*"])
@pytest.mark.parametrize("mesh", MESHES)
def test_entropy_and_chosen_tokens_at_a_temperature_equal_one_device(module, mesh):
    """In float64: loss, metrics and gradients of a step."""
    with jax.enable_x64(True):
        config = module(DISTILL, CHOICES, "train.loss_temperature=0.7", *MESHES[mesh])
        steps = Verification(config, say=lambda text: None)
        batch = steps.batches[0]
        assert batch["choices"].shape == (*batch["inputs"].shape, 3)
        _, got = steps.trainer.observe(steps.begin, steps.trainer.put(batch))
        _, want = steps.reference.observe(steps.reference.init(), batch, 0)
        assert max(one.error for one in compare(got, want)) < 1e-12


@pytest.mark.extended
def test_scores_of_a_batch_are_what_a_loss_reads(module):
    """At its temperature, and the most likely tokens are those that `choices` scores."""
    config = module(DISTILL, CHOICES, "train.loss_temperature=0.7", "optimizer.lr=1e-9")
    trainer = Trainer.resolve(config, jax.devices()[:4])
    state, batch = trainer.init(), random_batch(config)
    params, counts = state.params, batch["targets"].size
    scores = BatchScores(trainer, entropy=True, top=3)(params, batch)
    batch |= {"choices": scores.top_ids_BLK, "teacher": scores.top_logprobs_BLK}
    again = BatchScores(trainer)(params, batch)
    np.testing.assert_allclose(again.logprobs_BL, scores.logprobs_BL, rtol=1e-6)
    np.testing.assert_allclose(again.choice_logprobs_BLK, scores.top_logprobs_BLK, rtol=1e-6)
    assert (np.diff(scores.top_logprobs_BLK, axis=-1) <= 0).all()
    plain = BatchScores(trainer, temperature=1.0)(params, batch)
    assert abs(plain.logprobs_BL - scores.logprobs_BL).max() > 1e-3
    _, metrics = trainer.train_step(state, trainer.put(batch))  # the teacher is the model itself
    np.testing.assert_allclose(metrics["entropy"], scores.entropy_BL.sum() / counts, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -0.1 * metrics["entropy"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": 0.0}, "temperature=0.0: give 1e-06"),
        ({"temperature": float("nan")}, "temperature=nan: give 1e-06"),
        ({"top": 257}, "top=257: give 0 to model.vocab_size=256"),
    ],
)
def test_scores_that_do_not_exist_are_refused(options, sentence):
    trainer = Trainer.resolve(load("configs/quickstart.toml", []), jax.devices()[:4])
    with pytest.raises(ConfigError, match=sentence):
        BatchScores(trainer, **options)


MEAN = "import jax.numpy as jnp\ndef loss(logprobs, rows):\n    "


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (MEAN + "return logprobs.sum()", (), "return .total, count. or .total, count, metrics."),
        (MEAN + "return logprobs, 1", (), "its total is .* sum it over the microbatch"),
        (MEAN + "return -logprobs.sum(), (logprobs > -1).sum()", (), "its count depends on the"),
        (MEAN + "return -logprobs.sum() * rows['gain'].sum(), 1", (), "'gain'"),
        (MEAN + "return -logprobs.sum(), 1, {'loss': 1.0}", (), "has a metric 'loss'"),
        ("loss = 1", (), "has no function 'loss'"),
        (MEAN.replace("rows", "rows, kl") + "return kl.sum(), 1", (), "an argument 'kl': after"),
        (DISTILL, (), "reads choice_logprobs: add 'choices.K.' to train.loss_rows"),
        (DISTILL.replace("1, {", "entropy.sum(), {").replace("jnp.sum(rows[\"targets\"] != -100)",
         "entropy.sum()"), (CHOICES,), "its count depends on the"),
        (MODULE, (ROWS, "train.loss_temperature=0"), "train.loss_temperature"),
        (MODULE, (ROWS, "train.loss_temperature=inf"), "train.loss_temperature"),
        (MODULE, ('train.loss_rows=["a[b]"]',), "train.loss_rows"),
        (MODULE, ('train.loss_rows=["a", "a[2]"]',), "'a', which is twice: rename it"),
        (MODULE, ('train.loss_rows=["routes"]',), "'routes', which is a name that batches have"),
        (MODULE, ('train.loss_rows=["choices"]',), "say how many, as 'choices.8.'"),
        ("", ("train.loss=cross_entropy", "train.loss_temperature=2"), "only with train.loss="),
        ("", ("train.loss=dpo", "train.loss_temperature=2"), "only with train.loss='module:f"),
        (MODULE, ("parallel.cp=2",), "excludes parallel.cp=2"),
        (MODULE, ("preference.beta=0.2",), "is read only with train.loss='dpo'"),
        ("", ("train.loss=ppo",), "is no loss: choose cross_entropy, dpo"),
        ("", ("train.loss=dpo", "train.microbatch_size=3"), "give an even number"),
        ("", ("train.loss=dpo",), "data.source='stdlib', which has no pairs"),
        ("", ("train.loss=dpo", "train.loss_rows=['a']"), "only with train.loss='module:f"),
    ],
)  # fmt: skip
def test_refusals(module, text, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        module(text, *overrides)


def test_a_metric_that_hides_one_of_the_log(module):
    config = module(MEAN + "return -logprobs.sum(), 1, {'grad_norm': 1.0}")
    trainer = Trainer.resolve(config, jax.devices()[:4])
    with pytest.raises(ValueError, match="the loss returns a metric 'grad_norm', but a line of"):
        trainer.train_step.lower(trainer.state_shapes, trainer.put(random_batch(config)))


def test_a_batch_without_a_row(module):
    config = module(MODULE, ROWS)
    trainer = Trainer.resolve(config, jax.devices()[:4])
    shape = (*config.batch_shape.values(), config.train.seq_len)
    batch = dict.fromkeys(("inputs", "targets", "advantages"), np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match="the loss reads the row 'old_logprobs', but the batch"):
        trainer.train_step.lower(trainer.state_shapes, trainer.put(batch))
