"""Auxiliary outputs of layers in a trainer: the loss, the logs, and variables on disk."""

import io
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, complete, metrics
from compare import assert_same
from event_files import read_events
from kinds import CHOICES
from rich.console import Console
from routed import EXAMPLES, KINDS, LAYERS, batch_at, functions, restored, run, trainer_of
from toy import LENGTH

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config import load
from jaxpipe.core.contract import Aux
from jaxpipe.core.executor import step_ref
from jaxpipe.training.trainer import Trainer

ALONE = ("parallel.pp=1", "parallel.dp=1")
PP2 = ("parallel.pp=2", "parallel.dp=2")
MESHES = {
    "pp, dp and tp": (("parallel.pp=2", "parallel.dp=2", "parallel.tp=2"), 1),
    "pp, dp and ep": (("parallel.pp=2", "parallel.dp=4", "parallel.zero_stage=2"), 2),
}
MICROBATCHES = 4
TOKENS = MICROBATCHES * EXAMPLES * LENGTH


def keyed(trainer, state):
    """Return a state in its form on disk, as numpy."""
    keying = StateKeying(trainer.layout, trainer.sharding)
    return jax.tree.map(np.asarray, keying.to_keyed(state.parts()))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_that_of_one_device(mesh):
    """Loss and norm with the auxiliary loss, its counts and maxima, and the state after it."""
    overrides, ep = MESHES[mesh]
    with jax.enable_x64(True):
        trainer, alone = trainer_of(*overrides, ep=ep), trainer_of(*ALONE)
        batch = batch_at(0, MICROBATCHES, EXAMPLES)
        state = alone.init()
        key = jax.random.key(alone.config.train.seed)
        layers = [alone.model.init_layer(key, i, kind) for i, kind in enumerate(KINDS)]
        want = step_ref(
            functions(), alone.model.init_embed_head(key), layers, batch, variables=state.variables
        )
        gradients = want.gradients | {"layers": alone.layout.stack(want.gradients["layers"])}
        after, wanted = alone.update(state, want.losses.sum(), gradients, want.aux)
        got, made = trainer.train_step(trainer.init(), trainer.put(batch))
        means = want.losses * want.counts.sum() / want.counts
        more = {"loss_max": means.max(), "target_tokens": want.counts}
        assert_same(made, wanted | more | {"aux_loss": want.aux_losses.sum()})
        assert_same(keyed(trainer, got), keyed(alone, after))
        assert not np.array_equal(after.variables["bias"], state.variables["bias"])


def test_a_name_that_is_taken_is_refused():
    trainer = trainer_of(*ALONE)
    state = trainer.init()
    for name in ("loss", "step"):
        with pytest.raises(ValueError, match=f"a sum or maximum '{name}'"):
            trainer.update(state, jnp.float32(1), state.params, Aux(maxima={name: jnp.ones(2)}))


def test_counts_reach_the_logs(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=300)
    trainer = trainer_of(*PP2, "train.steps=3", "log.tensorboard=true")
    assert run(trainer, tmp_path, console=console) == 0
    logged = metrics(tmp_path)
    assert sorted(logged) == [1, 2, 3]
    for line in logged.values():
        assert [len(row) for row in line["counts"]] == [CHOICES] * LAYERS
        assert all(type(count) is int for row in line["counts"] for count in row)
        assert [sum(row) for row in line["counts"]] == [TOKENS, 0] * 2
        assert line["tokens"] == 2 * TOKENS
        assert type(line["tokens"]) is int
        np.testing.assert_allclose(sum(line["share"]), 2 * TOKENS)
    tags = {
        value.tag: value
        for event in read_events(tmp_path / "tensorboard")
        for value in event.summary.value
    }
    shown = [[tags[f"counts/{i}/{j}"].simple_value for j in range(CHOICES)] for i in range(LAYERS)]
    assert shown == logged[3]["counts"]
    assert tags["score"].simple_value == np.float32(logged[3]["score"])
    assert f"score {logged[3]['score']:.4g}" in out.getvalue()
    assert "counts" not in out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [(*ALONE, "parallel.schedule=1f1b"), ("parallel.pp=2", "parallel.schedule=zbv")],
    ids=str,
)
def test_variables_go_on_elsewhere(tmp_path, other):
    """Saved at step 3 of 6 under 1f1b on two ranks, then on one, or under another schedule."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = ("train.steps=6", "checkpoint.every=3")
    said = []
    with jax.enable_x64(True):
        first, second = trainer_of(*PP2, *steps), trainer_of(*other, *steps)
        assert run(first, whole) == 0
        shutil.copytree(whole, cut)
        shutil.rmtree(cut / "checkpoints" / "6")
        assert run(second, cut, say=said.append) == 0
        assert "resumed from step 3" in said[0]
        assert complete(cut) == [3, 6]
        (want, _), (got, _) = restored(first, whole), restored(second, cut)
        assert_same(got, want)
    np.testing.assert_array_equal(got["variables"]["bias"], want["variables"]["bias"])
    assert np.abs(want["variables"]["bias"]).max() > 0.1
    lines = [metrics(directory) for directory in (cut, whole)]
    assert list(lines[0]) == list(lines[1])
    for step in lines[1]:
        assert lines[0][step]["counts"] == lines[1][step]["counts"]
        np.testing.assert_allclose(lines[0][step]["loss"], lines[1][step]["loss"], rtol=1e-12)


def test_a_checkpoint_has_variables_only_where_a_model_has_them(tmp_path):
    """A checkpoint without variables can be resumed; variables then have their initial values."""
    plain = Trainer.resolve(load(SMALL, ALONE), jax.devices()[:1])
    before = {"params", "optimizer", "step"}
    assert plain.state_shapes.parts().keys() == before
    routed = trainer_of(*ALONE)
    state = routed.init()
    assert state.parts().keys() == before | {"variables"}
    older = {name: part for name, part in state.parts().items() if name in before}
    keying = StateKeying(routed.layout, routed.sharding)
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying) as checkpoints:
        checkpoints.save(1, older, {})
        parts, _ = checkpoints.restore(older, say=pytest.fail)
        fresh = jax.tree.leaves(state.variables)
        for found in (parts, checkpoints.restore(state.parts(), say=pytest.fail)[0]):
            assert found.keys() == before
            restarted = jax.tree.leaves(routed.state_of(found).variables)
            assert all(map(np.array_equal, restarted, fresh))
