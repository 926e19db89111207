"""Loss spikes: which steps are skipped, and runs that skip them, go back, or stop."""

import copy
import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from commands import SMALL, complete, losses, metrics, train_command
from event_files import read_events
from rich.console import Console
from routed import batches, restored, run, trainer_of
from several import ends, start_all
from test_loop import Recorder
from toy import LENGTH

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.run.rollback import Failure, roll_back
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.training.step_guard import StepGuard, able_to_go_on, without_spikes

SETTINGS = [
    "optimizer.decay=constant", "train.spike_sigma=6", "train.spike_window=4", "parallel.pp=2",
]  # fmt: skip
SAMPLES = 16  # in a step of the toy


def spiking(*steps):
    """Return the toy's batches; those of `steps`, counted by the data, have large gradients."""

    def data(position, **sizes):
        for number, batch in enumerate(batches(position, **sizes), start=position // SAMPLES + 1):
            ones = np.ones_like(batch["inputs"])
            yield batch | ({"inputs": 0 * ones, "targets": ones} if number in steps else {})

    return data


def without(*steps):
    """Return the toy's batches but those."""

    def data(position, **sizes):
        for number, batch in enumerate(batches(position, **sizes), start=1):
            if number not in steps:
                yield batch

    return data


def until(steps, trainer, **train):
    """Return the trainer for so many steps; with a constant rate its programs stay the same."""
    other, config = copy.copy(trainer), trainer.config
    train = msgspec.structs.replace(config.train, steps=steps, **train)
    config = msgspec.structs.replace(config, train=train)
    object.__setattr__(other, "plan", dataclasses.replace(trainer.plan, config=config))
    return other


def printing(*given, **named):
    """Run, and return the exit code and the printed lines."""
    out = io.StringIO()
    code = run(*given, console=Console(file=out, width=400), **named)
    return code, out.getvalue().splitlines()


def states(*directories):
    """Return the keyed states without step, and the guards, of the newest checkpoints."""
    found = [restored(trainer_of(*SETTINGS), directory) for directory in directories]
    return [({**state, "step": 0}, meta["guard"]) for state, meta in found]


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def skips_by_numpy(numbers, sigma, size):
    """Return by step whether it makes no update, from losses and norms `[steps, 2]` in float64."""
    window, skipped = [], []
    for pair in numbers.astype(np.float64):
        recent = np.array(window[-size:]).reshape(-1, 2)
        is_judged = 2 * len(recent) >= size and np.isfinite(pair).all()
        above = is_judged and (pair > recent.mean(0) + sigma * recent.std(0)).any()
        skipped.append(bool(above or not np.isfinite(pair).all()))
        window += [] if skipped[-1] else [pair]
    return skipped


@pytest.mark.parametrize(("sigma", "size"), [(2.5, 7), (4.0, 64)])
def test_the_criterion_is_that_of_numpy(sigma, size):
    random = np.random.default_rng(1)
    numbers = np.float32([3, 1]) + random.normal(size=(400, 2)).astype(np.float32) * 0.3
    numbers[:, 0] += np.linspace(1, -1, 400)
    numbers[random.choice(400, 30), random.choice(2, 30)] += 2
    numbers[[50, 51, 300], [0, 1, 0]] = np.nan, np.inf, -np.inf
    wide = [f"train.spike_sigma={sigma}", f"train.spike_window={size}", "train.spike_limit=400"]
    train = configs.load(SMALL, [*wide, "train.skip_non_finite=400"]).train

    def step(guard, pair):
        guard, updates = guard.after(*pair, train)
        return guard, ~updates

    _, skipped = jax.jit(lambda: jax.lax.scan(step, StepGuard.fresh(train), jnp.asarray(numbers)))()
    want = skips_by_numpy(numbers, sigma, size)
    assert skipped.tolist() == want
    assert 10 < sum(want) < 100


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["parallel.pp=1", "parallel.pp=2"])
def test_a_run_that_skips_a_spike_is_one_that_never_saw_its_data(tmp_path, mesh):
    trainer = trainer_of(*SETTINGS, mesh, "checkpoint.every=0")
    code, said = printing(until(8, trainer), tmp_path / "spike", data=spiking(6))
    assert code == 0
    assert run(until(7, trainer), tmp_path / "never", data=without(6)) == 0
    (got, guard), (want, other) = states(tmp_path / "spike", tmp_path / "never")
    same(got, want)
    assert guard["spikes"] == other["spikes"]
    lines = metrics(tmp_path / "spike")
    assert [line["skipped_steps"] for line in lines.values()] == [0] * 5 + [1] * 3
    assert [line["spikes_in_row"] for line in lines.values()] == [0] * 5 + [1, 0, 0]
    assert sum("at step 6: left out as a spike, 1 in a row of" in each for each in said) == 1


@pytest.mark.extended
def test_after_too_many_spikes_the_run_goes_back_and_on_with_later_data(tmp_path):
    """Step 3 is a spike, and 6, 7 and 8; so is a run resumed after the first of these."""
    how = [*SETTINGS, "train.spike_limit=2", "train.spike_rollbacks=1", "checkpoint.every=2"]
    at_once, resumed, never = (tmp_path / name for name in ("once", "resumed", "never"))
    data, trainer = spiking(3, 6, 7, 8), trainer_of(*how)
    code, said = printing(until(9, trainer), at_once, data=data)
    assert code == 0
    for steps in (6, 9):
        assert run(until(steps, trainer), resumed, data=data) == 0
    assert run(until(8, trainer), never, data=without(3, 5, 6, 7, 8)) == 0
    (once, guard), again, (wanted, other) = states(at_once, resumed, never)
    same((once, guard), again)
    same((once, guard["spikes"]), (wanted, other["spikes"]))
    assert any("rolled back to step 4; samples 64..127 of the training" in each for each in said)
    for directory in (at_once, resumed):
        assert complete(directory) == [2, 4, 6, 8, 9]
        lines = metrics(directory)
        assert [line["skipped_steps"] for line in lines.values()] == [0, 0] + [1] * 7
        meta = restored(trainer_of(*SETTINGS), directory)[1]
        assert (meta["position"], meta["passed_over"], meta["rollbacks"]) == (13 * 16, 4 * 16, 1)
        assert lines[9]["tokens_seen"] == meta["tokens"] == 9 * SAMPLES * LENGTH


@pytest.mark.slow
def test_several_processes_go_back_together(tmp_path):
    """With a low limit, at which ordinary steps are spikes: twice they go back, then they stop."""
    sizes = ["train.steps=16", "parallel.pp=2", "parallel.dp=2", "train.eval_every=0"]
    how = ["train.spike_sigma=0.7", "train.spike_window=4", "train.spike_limit=0"]
    saves = ["train.spike_rollbacks=2", "checkpoint.every=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main([str(SMALL), f"run.dir={one}", *sizes, *how, *saves, "parallel.tp=2"]) == 1
    command = train_command(two, *sizes, *how, *saves, "parallel.tp=2", devices=4)
    found = ends(start_all(2, command))
    assert [code for code, _ in found] == [1, 1], found[0][1]
    assert found[0][1].count("rolled back to step 2") == 2
    np.testing.assert_allclose([*losses(two).values()], [*losses(one).values()], rtol=1e-6)
    assert complete(one) == complete(two) == [2]


def test_a_rollback_to_damaged_checkpoints_removes_no_other():
    removed = []
    checkpoints = SimpleNamespace(
        restore=lambda *given, last_step: None, remove_after=removed.append
    )
    config = configs.load(SMALL)
    shapes = SimpleNamespace(parts=dict)
    trainer = SimpleNamespace(config=config, state_shapes=shapes)
    failed = Failure({}, SimpleNamespace(step=9, after=None), {"loss": 9.0, "grad_norm": 1.0})
    with pytest.raises(ConfigError, match="no undamaged checkpoint to go back to"):
        roll_back(trainer, checkpoints, failed, print)
    assert not removed


@pytest.mark.parametrize("rollbacks", [0, 1])
def test_without_a_rollback_the_run_stops(tmp_path, rollbacks):
    """No rollback is allowed, or there is no checkpoint to go back to."""
    limits = ["train.spike_limit=1", f"train.spike_rollbacks={rollbacks}", "checkpoint.every=0"]
    recorder = Recorder(tmp_path, *SETTINGS[1:3], *limits, losses={6: 9.0, 7: 8.0, 8: 1.0})
    recorder.wait, recorder.steps = lambda: None, []
    assert recorder.run() == 1
    assert recorder.order("save") == [("save", 6)]
    said = [message for _, message in recorder.order("say") if "spike" in message]
    assert "at step 6: left out as a spike, 1 in a row of at most train.spike_limit=1" in said[0]
    assert "step 7, number 2 in a row of steps left out since a spike, samples 48..55" in said[1]
    train = recorder.config.train
    assert not StepGuard.fresh(train).restored(recorder.guard).stops(train)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_from_its_last_checkpoint(tmp_path):
    """Which it saved before it knew that the next step would stop it."""
    how = [*SETTINGS, "train.spike_limit=1", "checkpoint.every=1"]
    trainer, data = trainer_of(*how), spiking(6, 7)
    assert run(until(8, trainer), tmp_path, data=data) == 1
    assert complete(tmp_path)[-1] == 6
    assert run(until(8, trainer), tmp_path, data=data) == 0


@pytest.mark.slow
def test_without_a_checkpoint_from_before_the_spikes_a_new_start_goes_back_to_its_own(tmp_path):
    """The only checkpoint is of a step within the series, whose parameters are those before it."""
    how = [*SETTINGS, "train.spike_limit=1", "train.spike_rollbacks=1", "checkpoint.every=3"]
    trainer, data = trainer_of(*how), spiking(3, 4, 5, 6)
    assert run(until(8, trainer), tmp_path, data=data) == 1
    assert complete(tmp_path) == [3]
    code, said = printing(until(8, trainer), tmp_path, data=data)
    assert code == 0
    assert sum("number 2 in a row" in line and "back to step 3" in line for line in said) == 1


@pytest.mark.parametrize(
    ("in_row", "may_roll_back", "has_older", "left"),
    [
        (1, False, False, 1), (2, False, True, 0),  # at the limit, the next spike would stop it
        (2, True, True, 2), (3, True, True, 0),  # above it the limit is lower than it was
        (1, True, False, 0), (2, True, False, 0),
    ],
)  # fmt: skip
def test_a_series_that_would_stop_the_resumed_run_is_over(in_row, may_roll_back, has_older, left):
    config = configs.load(SMALL, ["train.spike_sigma=6", "train.spike_limit=2"])
    saved = StepGuard.fresh(config.train).saved() | {"skipped": 7}
    saved["spikes"]["in_row"] = in_row
    able = able_to_go_on(saved, config.train, may_roll_back=may_roll_back, has_older=has_older)
    assert able == saved | {"spikes": saved["spikes"] | {"in_row": left}}


def test_a_rollback_may_lead_to_before_spikes_were_counted():
    assert without_spikes({"skipped": 2}) == {"skipped": 2}


def test_a_spike_between_steps_that_are_not_finite_does_not_end_their_series(tmp_path):
    losses = {6: np.nan, 7: 9.0, 8: np.nan}
    recorder = Recorder(tmp_path, *SETTINGS[1:3], "train.skip_non_finite=1", losses=losses)
    assert recorder.run() == 1
    assert recorder.order("save")[-1] == ("save", 7)
    said = [message for _, message in recorder.order("say") if "at step" in message]
    assert "at step 6: left out, 1 in a row of at most train.skip_non_finite=1" in said[0]
    assert "at step 7: left out as a spike" in said[1]
    assert "at step 8, samples" in said[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.spike_rollbacks=1"], "is read only with train.spike_sigma, but"),
        (
            ["train.spike_rollbacks=1", "train.spike_sigma=6", "checkpoint.keep=2"],
            "checkpoint.every=4 and checkpoint.keep=2 keep none that is train.spike_limit=8 steps "
            "old: raise checkpoint.every or checkpoint.keep",
        ),
        (
            ["train.spike_rollbacks=1", "train.spike_sigma=6", "checkpoint.keep=1"],
            "steps old: set checkpoint.keep to 2 or more",
        ),
        (
            ["train.spike_rollbacks=1", "train.spike_sigma=6", "checkpoint.every=0"],
            r"steps old: set checkpoint.every\.$",
        ),
        (["train.spike_sigma=6", "train.fused_steps=2"], "train.spike_sigma=6.0: ranks update"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(configs.load(SMALL, settings))


def test_a_log_goes_back(tmp_path):
    """Steps after the checkpoint are dropped; TensorBoard drops them at a START event."""
    config = configs.load(SMALL, [f"run.dir={tmp_path}", "log.tensorboard=true"])
    with MetricsLog(tmp_path, last_step=0, loggers=open_loggers(config, 0)) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 1.0})
        log.rewind(1)
        log.write(2, {"loss": 2.0})
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0)]
    written = read_events(tmp_path / "tensorboard")
    found = [(event.step, event.session_log.status) for event in written]
    assert found == [(0, 0), (1, 1), (1, 0), (2, 0), (3, 0), (2, 1), (2, 0)]
