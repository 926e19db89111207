"""Evaluations of a model with a capacity drop no token; what repeats a step drops what it drops."""

import jax
import numpy as np
import pytest
from commands import SMALL
from msgspec import structs
from oracles.plain_mixture import logits
from saved_runs import ONE_DEVICE, saved_run

from jaxpipe import config as configs
from jaxpipe import score
from jaxpipe.data.__main__ import main as data
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.inference.scoring import Scorer
from jaxpipe.inference.settings import evaluation_config, inference_config
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer

EXPERTS = (
    "model.n_kv_heads=4", "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16",
)  # fmt: skip
SHARED = "parallel.dp=2", "parallel.ep=2", "parallel.ep_buffer_factor=0.5"
NARROW = (*EXPERTS, "model.capacity_factor=0.5")  # half of the choices are dropped, or more


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with a capacity, its trainer, state and rows `[N, L + 1]`."""
    directory = tmp_path_factory.mktemp("narrow") / "run"
    trainer, state, ids = saved_run(directory, *NARROW)
    return directory, trainer, state, ids.reshape(-1, ids.shape[-1])


def expected(trainer, state, ids):
    """Return the log-probabilities of tokens by the plain decoder, which has no capacity."""
    layers = trainer.layout.unstack(jax.device_get(state.params["layers"]))
    params = {"embed_head": jax.device_get(state.params["embed_head"]), "layers": layers}
    with jax.numpy_rank_promotion("allow"):
        every = jax.nn.log_softmax(logits(params, trainer.config.model, ids[:-1]))
    return np.take_along_axis(np.asarray(every), ids[1:, None], -1)[:, 0], every.argmax(-1)


def loaded(directory, *overrides, longest=32):
    saved = SavedModel.open(directory)
    config = inference_config(saved.model, overrides, rows=2, longest=longest)
    return LoadedModel.load(saved, config)


def batch_of(trainer, ids):
    rows = ids.reshape(*trainer.config.batch_shape.values(), -1)
    return {"inputs": rows[..., :-1], "targets": rows[..., 1:]}


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["", "parallel.dp=2 parallel.ep=2"])
def test_scores(run, mesh):
    directory, trainer, state, ids = run
    rows = [ids[0], ids[1][:9]]
    for row, found in zip(rows, Scorer(loaded(directory, *mesh.split())).score(rows), strict=True):
        want, best = expected(trainer, state, row)
        np.testing.assert_allclose(found.logprobs, want, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found.greedy, best == row[1:])


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["", "parallel.pp=2"])
def test_generated_tokens(run, mesh):
    """With a cache, whose prompt is read in a slice of 16 tokens and single ones, and without."""
    directory, trainer, state, ids = run
    prompts = [ids[0][:19].tolist(), ids[1][:7].tolist()]
    made = Generator(loaded(directory, *mesh.split())).generate(prompts, 6, lambda *_: False)
    for prompt, (new, _) in zip(prompts, made, strict=True):
        _, best = expected(trainer, state, np.array(prompt + new, np.int32))
        assert new == best[len(prompt) - 1 :].tolist()


@pytest.mark.extended
@pytest.mark.parametrize(("settings", "devices"), [(NARROW, 1), ((*EXPERTS, *SHARED), 2)])
def test_held_out_loss(settings, devices):
    """The step's own loss is another one, since it drops tokens."""
    config = configs.load(SMALL, [*ONE_DEVICE, *settings])
    trainer = Trainer.resolve(config, jax.devices()[:devices])
    shape = (*trainer.config.batch_shape.values(), trainer.config.train.seq_len + 1)
    ids = np.random.default_rng(3).integers(0, 256, shape, np.int32).reshape(-1, shape[-1])
    state, batch = trainer.init(), trainer.put(batch_of(trainer, ids))
    state = state._replace(params=jax.tree.map(lambda leaf: 4 * leaf, state.params))
    loss, _ = trainer.eval_step(state, batch)
    want = -np.mean([expected(trainer, state, row)[0] for row in ids])
    np.testing.assert_allclose(loss, want, rtol=2e-6)
    _, metrics = trainer.train_step(state, batch)
    assert np.max(metrics["expert_dropped_share"]) > 0.1
    assert abs(metrics["loss"] - want) > 1e-4


@pytest.mark.extended
def test_scores_of_batches_drop_what_the_step_drops(run):
    _, trainer, state, ids = run
    batch = batch_of(trainer, ids)
    found = BatchScores(trainer)(state.params, batch).logprobs_BL
    copy = jax.tree.map(lambda leaf: leaf + 0 if hasattr(leaf, "dtype") else leaf, state)
    _, metrics = trainer.train_step(copy, trainer.put(batch))
    np.testing.assert_allclose(-found.mean(), metrics["loss"], rtol=1e-6)
    plain = np.array([expected(trainer, state, row)[0] for row in ids])
    assert np.abs(found.reshape(plain.shape) - plain).max() > 1e-3


def test_tasks_of_a_run():
    model = configs.load(SMALL, [*ONE_DEVICE, *NARROW])
    parallel = structs.replace(model.parallel, ep_buffer_factor=0.5)
    found = evaluation_config(structs.replace(model, parallel=parallel), 40)
    assert (found.model.capacity_factor, found.parallel.ep_buffer_factor) == (0, 0)
    assert found.model.n_experts == 4


def test_a_capacity_is_kept_or_set_on_purpose():
    model = configs.load(SMALL, NARROW).model

    def capacity(*overrides, **how):
        return inference_config(model, overrides, rows=1, longest=8, **how).model.capacity_factor

    assert (capacity(), capacity(dropless=False)) == (0, 0.5)
    assert capacity("model.capacity_factor=2.0") == 2.0
    assert capacity("model.capacity_factor=2.0", dropless=False) == 2.0


@pytest.mark.extended
def test_reference_scores_of_a_folder_drop_what_the_step_drops(run, tmp_path, capsys):
    """Those of `score` beside tokens, which DPO reads."""
    directory, trainer, state, _ = run
    (tmp_path / "texts.jsonl").write_text('{"text": "def function(self, value): return value"}\n')
    folder = tmp_path / "folder"
    words = ["prepare", str(tmp_path / "texts.jsonl"), "--tokenizer", "bytes", "--out", str(folder)]
    assert data(words) == 0
    assert score.main([str(directory), str(folder)]) == 0
    assert "model.capacity_factor=0.5" in capsys.readouterr().out
    (reference,) = (np.fromfile(path, "<f4") for path in folder.glob("*.reference"))
    (ids,) = score.PreparedFolder.open(folder).sequences
    config = structs.replace(
        trainer.config,
        train=structs.replace(
            trainer.config.train, seq_len=len(ids) - 1, grad_accum_steps=1, microbatch_size=1
        ),
    )
    one = Trainer.resolve(config, jax.devices()[:1])
    want = BatchScores(one)(state.params, batch_of(one, ids)).logprobs_BL[0, 0]
    np.testing.assert_allclose(reference[1:], want, rtol=0, atol=1e-5)
    plain, _ = expected(trainer, state, ids)
    assert np.abs(reference[1:] - plain).max() > 1e-3
