"""Skipped non-finite steps: the numbers of such a run, and the loss scale of float16."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, metrics
from routed import batches, restored, run, trainer_of
from toy import NOT_FINITE, TOY, toy_batch, toy_params

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.executor import Pipeline
from jaxpipe.core.mesh import make_mesh
from jaxpipe.schedules import build
from jaxpipe.training import step_guard
from jaxpipe.training.trainer import Trainer

CONSTANT = ["optimizer.decay=constant", "checkpoint.every=0"]
FLOAT16 = ["train.compute_dtype=float16", "train.skip_non_finite=50", "train.seq_len=16"]


def tokens(position, microbatches, batch_size, rows=None):
    """Yield batches of the decoder that differ from step to step."""
    while True:
        random = np.random.default_rng(position)
        ids = random.integers(256, size=(microbatches, batch_size, 17)).astype(np.int32)
        positions = np.broadcast_to(np.arange(16, dtype=np.int32), ids[..., 1:].shape)
        yield {"inputs": ids[..., :-1], "targets": ids[..., 1:], "positions": positions}
        position += microbatches * batch_size


def without(step):
    """Return the toy's batches; that of `step` has a NaN loss."""

    def broken(position, **sizes):
        first = position // 8 + 1
        for number, batch in enumerate(batches(position, **sizes), start=first):
            bad = (
                {"positions": np.full_like(batch["positions"], NOT_FINITE)}
                if number == step
                else {}
            )
            yield batch | bad

    return broken


def passing_over(step):
    """Return the toy's batches without that of `step`."""

    def others(position, **sizes):
        for number, batch in enumerate(batches(position, **sizes), start=1):
            if number != step:
                yield batch

    return others


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["parallel.pp=1", "parallel.pp=2"])
def test_a_run_that_left_a_step_out_is_one_that_never_saw_its_data(tmp_path, mesh):
    trainer = trainer_of(mesh, *CONSTANT, "train.steps=5", "train.skip_non_finite=1")
    assert run(trainer, tmp_path / "skipped", data=without(3)) == 0
    never = trainer_of(mesh, *CONSTANT, "train.steps=4")
    assert run(never, tmp_path / "never", data=passing_over(3)) == 0
    (got, meta), (want, _) = (
        restored(trainer, tmp_path / "skipped"),
        restored(never, tmp_path / "never"),
    )
    assert (got.pop("step"), want.pop("step")) == (5, 4)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert meta["position"] == 5 * trainer.samples_per_step
    assert meta["guard"] == {"in_row": 0, "skipped": 1, "finite_steps": 2}
    lines = metrics(tmp_path / "skipped")
    assert [line["skipped_steps"] for line in lines.values()] == [0, 0, 1, 1, 1]
    assert lines[3]["loss"] is None


@pytest.mark.slow
def test_a_resumed_run_knows_how_many_it_left_out(tmp_path):
    settings = [*CONSTANT, "train.skip_non_finite=1"]
    assert run(trainer_of(*settings, "train.steps=3"), tmp_path, data=without(2)) == 0
    assert run(trainer_of(*settings, "train.steps=4"), tmp_path) == 0
    assert metrics(tmp_path)[4]["skipped_steps"] == 1


@pytest.mark.parametrize(("in_row", "left"), [(1, 1), (2, 0)])
def test_a_resumed_run_goes_on_counting_unless_the_next_step_would_stop_it(in_row, left):
    train = configs.load(SMALL, ["train.skip_non_finite=2"]).train
    guard, nothing = step_guard.StepGuard.fresh(train), jnp.float32(jnp.nan)
    for _ in range(in_row):
        guard, _ = guard.after(nothing, nothing, train)
    saved = step_guard.able_to_go_on(guard.saved(), train, may_roll_back=False, has_older=False)
    again = step_guard.StepGuard.fresh(train).restored(saved)
    assert (again.in_row, again.skipped) == (left, in_row)


def half_precision(steps, *overrides):
    """Return a trainer of the decoder in float16."""
    settings = [*FLOAT16, f"train.steps={steps}", "train.eval_every=0", "checkpoint.every=0"]
    return Trainer.resolve(configs.load(SMALL, [*settings, *overrides]))


@pytest.mark.slow
def test_the_loss_scale_falls_until_gradients_are_finite_and_is_saved(tmp_path, monkeypatch):
    """The first scale is so large that they are not; an interrupted run resumes with its scale."""
    monkeypatch.setattr(step_guard, "_FIRST_SCALE", 2.0**26)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(half_precision(24), whole, data=tokens) == 0
    for steps in (5, 24):
        assert run(half_precision(steps), parts, data=tokens) == 0
    lines = metrics(whole).values()
    skipped = [line["skipped_steps"] for line in lines]
    scales = [line["loss_scale"] for line in lines]
    assert 2 < skipped[-1] < 12
    assert (skipped[0], scales[0]) == (1, 2.0**26)
    assert scales[1:] == [2.0 ** (26 - number) for number in skipped[:-1]]
    before = [0, *skipped[:-1]]
    assert [line["grad_norm"] is None for line in lines] == np.not_equal(skipped, before).tolist()
    (got, meta), (want, other) = (restored(half_precision(24), path) for path in (parts, whole))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert meta["guard"] == other["guard"]
    assert meta["guard"]["loss_scale"] == 2.0 ** (26 - skipped[-1])


def test_the_loss_scale_doubles_after_finite_steps():
    train = configs.load(SMALL, FLOAT16).train
    now = step_guard.StepGuard.fresh(train)
    for finite, factor in ((True, 2), (False, 1), (True, 1)):
        last = now.restored({"loss_scale": float(now.loss_scale), "finite_steps": 1999})
        loss = jnp.float32(1 if finite else jnp.nan)
        before, now = now.loss_scale, last.after(loss, jnp.float32(1), train)[0]
        assert now.loss_scale == before * (2 if finite else 0.5), factor


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_do_not_depend_on_the_loss_scale(schedule):
    """A power of two changes exponents alone, so they are bitwise equal."""
    params, layers = toy_params(0, 4)
    pipeline = Pipeline(
        TOY, build(schedule, pp=2, microbatches=4), make_mesh(pp=2, devices=jax.devices()[:2])
    )
    stacked = {"embed_head": params, "layers": pipeline.layout(2).stack(layers)}
    batch = toy_batch(1, 4, 2)
    plain = jax.jit(pipeline.step)(stacked, batch)
    scaled = jax.jit(pipeline.step)(stacked, batch, None, jnp.float32(2**20))
    chex.assert_trees_all_equal(scaled, plain)


def test_so_many_steps_must_not_be_negative():
    with pytest.raises(ConfigError, match="train.skip_non_finite: expected `int` >= 0, got -1"):
        configs.load(SMALL, ["train.skip_non_finite=-1"])
