"""Rows of few targets or none: the held-out loss, steps without an update, and the log."""

import io
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, metrics
from rich.console import Console
from routed import batches, restored, run, trainer_of

from jaxpipe import config as configs
from jaxpipe.core.contract import Context
from jaxpipe.data.batches import DataSplit, heldout_order
from jaxpipe.model.loss import IGNORE
from jaxpipe.run.loop import TrainLoop
from jaxpipe.runtime.group import Group
from jaxpipe.training import step_guard
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.trainer import Trainer

LENGTH, ROWS = 16, 7
TARGETS = (0, 5, 16, 0, 1, 0, 9)  # of each held-out row
ALONE = ["parallel.pp=1", "parallel.dp=1"]
LAYOUTS = {  # batches x microbatches x rows of the first six rows
    "6 x 1 x 1": (6, 1, 1, ALONE),
    "3 x 1 x 2": (3, 1, 2, ["parallel.pp=1", "parallel.dp=2"]),
    "2 x 3 x 1": (2, 3, 1, ["parallel.pp=2", "parallel.dp=1"]),
    "1 x 6 x 1": (1, 6, 1, ["parallel.pp=2", "parallel.dp=1"]),
}


def samples():
    random = np.random.default_rng(0)
    for targets in TARGETS:
        ids = random.integers(0, 256, LENGTH + 1).astype(np.int32)
        counts = np.arange(LENGTH) >= LENGTH - targets
        yield {"inputs": ids[:-1], "targets": np.where(counts, ids[1:], np.int32(IGNORE))}


def trainer_for(*overrides):
    config = configs.load(SMALL, [f"train.seq_len={LENGTH}", "optimizer.lr=1e-2", *overrides])
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


def heldout_loss(trainer, count=ROWS):
    """Return the loop's held-out loss of the first `count` rows at step 0, and its log."""
    split = DataSplit("held-out", "", list(samples())[:count], heldout_order([count], [1]))
    said = []
    data, progress = SimpleNamespace(heldout=split), SimpleNamespace(say=said.append)
    run = TrainLoop(trainer, data, None, progress, None, Group())
    with CompiledSteps(trainer, Group(), said.append):
        return run._heldout_loss(trainer.init()), said


@cache
def plain_loss(count=ROWS):
    """Row by row on one device: the sum of all targets' losses over their number."""
    trainer = trainer_for(*ALONE)
    params, model = trainer.init().params, trainer.model
    total, targets = 0.0, 0
    for sample in list(samples())[:count]:
        rows = jax.tree.map(lambda leaf: leaf[None], sample)
        x = model.embed(params["embed_head"], rows)
        for index, layer in enumerate(params["layers"]):
            one = jax.tree.map(lambda leaf: leaf[0], layer)
            x = model.layer(one, x, Context(rows, jnp.int32(index))).y
        # the head's own sum, of one target at a time
        for at in np.flatnonzero(sample["targets"] != IGNORE):
            alone = np.full_like(rows["targets"], IGNORE)
            alone[0, at] = sample["targets"][at]
            total += float(model.head(params["embed_head"], x, rows | {"targets": alone}))
            targets += 1
    return total / targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_held_out_loss_is_the_same_however_its_rows_are_distributed(layout):
    number, microbatches, rows, mesh = LAYOUTS[layout]
    sizes = [f"train.grad_accum_steps={microbatches}", f"train.eval_steps={number}"]
    found, said = heldout_loss(trainer_for(*mesh, *sizes), number * microbatches * rows)
    assert number * microbatches * rows == 6
    assert found == pytest.approx(plain_loss(6), rel=1e-6)
    assert not [line for line in said if "held-out" in line]


@pytest.mark.parametrize(("microbatches", "mesh"), [(2, ALONE), (3, LAYOUTS["3 x 1 x 2"][3])])
def test_rows_that_do_not_fill_the_last_batch_count_too(microbatches, mesh):
    """Seven rows in batches of two and of six."""
    sizes = ["train.eval_steps=100", f"train.grad_accum_steps={microbatches}"]
    assert heldout_loss(trainer_for(*mesh, *sizes))[0] == pytest.approx(plain_loss(), rel=1e-6)


def test_a_held_out_loss_without_targets_is_none():
    loss, said = heldout_loss(trainer_for(*ALONE, "train.grad_accum_steps=1"), count=1)
    assert math.isnan(loss)
    assert said[-1] == "no held-out row has a target: there is no held-out loss"


def tokens(masked=()):
    """Return batches; those of the steps in `masked` have no target."""

    def masked_batches(position, microbatches, batch_size, rows=None):
        while True:
            step = position // (microbatches * batch_size) + 1
            ids = np.random.default_rng(position).integers(
                0, 256, (microbatches, batch_size, LENGTH + 1)
            )
            inputs, targets = ids[..., :-1].astype(np.int32), ids[..., 1:].astype(np.int32)
            if step in masked:
                targets = np.full_like(targets, IGNORE)
            yield {"inputs": inputs, "targets": targets}
            position += microbatches * batch_size

    return masked_batches


EXPERTS = [
    "model.n_experts=4", "model.experts_per_token=2", "model.router_aux_loss=0.01",
    "model.router_bias_rate=0.001",
]  # fmt: skip
STEPS = ["train.eval_every=0", "checkpoint.every=0", "optimizer.decay=constant"]
MESHES = {
    "one device": [*ALONE],
    "pp and dp": ["parallel.pp=2", "parallel.dp=2"],
    "experts": [*EXPERTS, "parallel.pp=2", "parallel.dp=2", "parallel.ep=2"],
    "fused steps": ["parallel.pp=2", "parallel.dp=1", "train.fused_steps=2"],
    "float16": [*ALONE, "train.compute_dtype=float16", "train.skip_non_finite=20"],
}


@pytest.mark.slow(only=["one device", "pp and dp", "experts", "fused steps", "float16"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_without_targets_changes_nothing_but_its_number(tmp_path, mesh):
    """A run with two such steps equals one without: parameters, moments, biases, rates."""
    with_them = trainer_for(*MESHES[mesh], *STEPS, "train.steps=6")
    out = io.StringIO()
    console = Console(file=out, width=300)
    assert run(with_them, tmp_path / "with", console=console, data=tokens(masked=(3, 4))) == 0

    def others(position, **sizes):
        for step, batch in enumerate(tokens()(position, **sizes), start=1):
            if step not in (3, 4):
                yield batch

    never = trainer_for(*MESHES[mesh], *STEPS, "train.steps=4")
    assert run(never, tmp_path / "never", data=others) == 0
    (got, meta), (want, _) = (
        restored(with_them, tmp_path / "with"),
        restored(never, tmp_path / "never"),
    )
    assert (got.pop("step"), want.pop("step")) == (6, 4)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert meta["guard"]["skipped"] == 2
    assert [line for line in out.getvalue().splitlines() if "no target" in line] == [
        f"step {step} has no target: it made no update" for step in (3, 4)
    ]
    lines = metrics(tmp_path / "with")
    assert [step for step, line in lines.items() if line["loss"] is None] == [3, 4]
    assert [step for step, line in lines.items() if line["loss_max"] is None] == [3, 4]
    assert [line["target_tokens"] == 0 for line in lines.values()] == [s in (3, 4) for s in lines]
    assert lines[6].get("skipped_steps") == 2
    assert ("skipped_steps" in lines[1]) == ("float16" in mesh)
    if "experts" in mesh:
        assert lines[3]["aux_loss"] > 0  # its tokens were routed all the same


def test_the_largest_loss_is_of_the_microbatches_that_have_targets():
    trainer = trainer_for(*ALONE, "train.grad_accum_steps=4")
    batch = next(tokens()(0, 4, 1))
    batch["targets"][0] = IGNORE
    batch["targets"][2, :, 1:] = IGNORE
    state = trainer.init()
    means = []
    for m in (1, 2, 3):
        own = batch["targets"].copy()
        own[[i for i in range(4) if i != m]] = IGNORE
        means.append(float(trainer.eval_step(state, trainer.put(batch | {"targets": own}))[0]))
    _, made = trainer.train_step(trainer.init(), trainer.put(batch))
    assert float(made["loss_max"]) == pytest.approx(max(means), rel=1e-6)
    assert made["target_tokens"].tolist() == [0, LENGTH, 1, LENGTH]


@pytest.mark.slow(only=["0", "20"])
@pytest.mark.parametrize("limit", [0, 20])
def test_a_resumed_run_logs_the_rate_of_its_updates(tmp_path, monkeypatch, limit):
    """A float16 step that overflows is no update, whether or not steps may be skipped."""
    monkeypatch.setattr(step_guard, "_FIRST_SCALE", 2.0**26)
    how = [*ALONE, "train.eval_every=0", "optimizer.warmup_steps=24", "train.compute_dtype=float16"]
    skips = "train.skip_non_finite=40"
    steps = ["train.steps=24", "checkpoint.every=20"]
    assert run(trainer_for(*how, *steps, skips), tmp_path, data=tokens()) == 0
    skipped = metrics(tmp_path)[20]["skipped_steps"]
    assert skipped > 2
    (tmp_path / "checkpoints" / "24").rename(tmp_path / "24")
    resumed = trainer_for(*how, *steps, f"train.skip_non_finite={limit}")
    assert run(resumed, tmp_path, data=tokens()) == 0
    for step, line in metrics(tmp_path).items():
        if step > 20:
            updates = step - line["skipped_steps"]
            assert line["lr"] == pytest.approx(1e-2 * updates / 24, rel=1e-6)
            assert (
                line["skipped_steps"] == skipped if limit == 0 else line["skipped_steps"] >= skipped
            )
    leaves = jax.tree.leaves_with_path(restored(resumed, tmp_path)[0]["optimizer"])
    counts = {int(leaf) for path, leaf in leaves if "count" in jax.tree_util.keystr(path[-1:])}
    assert counts == {updates}


def test_counts_of_a_step_pass_the_largest_int32():
    """A model that counts 2^30 terms in each microbatch: the mean is over all of them."""
    toy = trainer_of(*ALONE)
    pipeline, state = toy.pipeline, toy.init()
    batch = toy.put(next(batches(0, **toy.config.batch_shape)))
    found = []
    for terms in (2**30, 1):

        def count(rows, terms=terms):
            return jnp.int32(terms)

        def counted(kind, terms=terms):
            def layer(params, x, context):
                output = kind.layer(params, x, context)
                losses = {name: (total, terms) for name, total in output.aux.loss_sums.items()}
                return output._replace(aux=output.aux._replace(losses=losses))

            return replace(kind, layer=layer)

        kinds = {name: counted(k) for name, k in pipeline.functions.kinds_by_name.items()}
        functions = replace(pipeline.functions, count=count, kinds=kinds)
        step = jax.jit(replace(pipeline, functions=functions).step)
        found.append(step(state.params, batch, state.variables))
    for made in ("losses", "aux_losses"):
        got, want = (getattr(step, made) for step in found)
        np.testing.assert_allclose(np.float64(got) * 2**30, want, rtol=1e-6)
