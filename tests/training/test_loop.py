"""The loop: what it dispatches before it reads, and how it handles a non-finite loss."""

import itertools
import json
import os
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import SMALL, complete, metrics
from routed import batches, restored, run, trainer_of
from toy import NOT_FINITE

from jaxpipe.config import load
from jaxpipe.run import loop
from jaxpipe.run import pending_steps as unread
from jaxpipe.run.loop import TrainLoop
from jaxpipe.run.start import DataPosition
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.runtime import position
from jaxpipe.runtime.group import Group
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.state import State
from jaxpipe.training.step_guard import StepGuard

pytestmark = pytest.mark.usefixtures("hangup_stops", "new_run")

SAMPLES = 8  # in a step of `SMALL`


class Number:
    """A number on a device; it records an event when the loop waits for it."""

    def __init__(self, events, step, value):
        self.events, self.step, self.value = events, step, value

    def __array__(self, dtype=None, copy=None):
        self.events.append(("read", self.step))
        return np.asarray(self.value, dtype)


class Recorder:
    """Stand-ins for all parts of a run; `events` are the loop's actions, in order.

    Losses are 1 except those given by step; SIGTERM comes while a step is dispatched or read.
    """

    fingerprint = "none"
    samples_per_step = SAMPLES
    state_shapes = SimpleNamespace(optimizer=None)
    carried = {}  # noqa: RUF012

    def __init__(self, directory, *overrides, losses=None, signal_at=None):
        self.directory, self.losses, self.signal_at = directory, losses or {}, signal_at
        self.events, self.logged, self.position = Events(signal_at), [], None
        self.config = load(SMALL, ["train.eval_every=0", *overrides])
        self.train = self.heldout = self.sharder = self
        self.sizes = self.config.batch_shape

    def batches(self, position, **_):
        for number in itertools.count(position // SAMPLES + 1):
            self.events.append(("batch", number))
            yield number

    def put(self, batch, position=None):
        return batch

    def train_step(self, state, batch):
        self.events.append(("dispatch", batch))
        loss = self.losses.get(batch, 1.0)
        norm, train = np.float32(1), self.config.train
        guard, _ = state.guard.after(np.float32(loss), norm, train)
        numbers = {"loss": Number(self.events, batch, loss), "grad_norm": norm}
        numbers |= {"target_tokens": [3, 5]} | guard.metrics()
        return State(None, None, state.step + (not guard.stops(train)), None, guard), numbers

    def eval_step(self, state, batch):
        self.events.append(("evaluate", state.step))
        return 2.0, np.int32([3, 5])

    def tasks(self, state):
        assert position.now.phase == "tasks"  # which may take longer than a step
        self.events.append(("tasks", state.step))
        return {"tasks/one/acc": state.step / 10}

    def rates(self, step, tokens, seconds, skipped, contents):
        assert (tokens, contents) == (step * SAMPLES * 32, None)
        return {"lr": step - 1 - skipped, "step_seconds": seconds}

    def save(self, step, parts, meta):
        assert parts["step"] == step
        self.events.append(("save", step))
        self.position, self.guard = meta["position"], meta["guard"]

    def is_written(self, step):
        return ("save", step) in self.events

    def clear_local(self):
        self.events.append(("clear", None))

    def say(self, message):
        self.events.append(("say", message))

    def update(self, step, values, *, first):
        assert first == (step == 1)
        self.events += [("load", step)] * first
        self.events.append(("log", step))

    def run(self):
        with MetricsLog(self.directory, last_step=0) as log, pytest.MonkeyPatch.context() as patch:
            # These steps cannot be compiled ahead.
            patch.setattr(
                CompiledSteps, "_compiled_by_all", lambda _, name, program, *args: program
            )
            fresh = State(None, None, 0, None, StepGuard.fresh(self.config.train))
            tasks = self.tasks if self.config.train.evaluate_every else None
            training = TrainLoop(self, self, self, self, log, Group(), tasks=tasks)
            return training.loop(fresh, DataPosition())

    def order(self, *names):
        return [event for event in self.events if event[0] in names]

    def lines(self):
        text = (self.directory / "metrics.jsonl").read_text()
        return list(map(json.loads, text.splitlines()))


class Events(list):
    """Events; one of them sends the process a signal."""

    def __init__(self, signal_at, number=signal.SIGTERM):
        super().__init__()
        self.signal_at, self.number = signal_at, number

    def append(self, event):
        super().append(event)
        if event == self.signal_at:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def new_run():
    """Let a run be the first of this process, as that of a command is: it reports its start."""
    position.restart()


def test_a_step_is_dispatched_before_the_one_before_it_is_read(tmp_path):
    """But for the second: what the first log loads would count as its time."""
    recorder = Recorder(tmp_path, "train.steps=4", "checkpoint.every=0")
    assert recorder.run() == 0
    assert recorder.order("batch", "dispatch", "read", "log", "save") == [
        ("batch", 1), ("dispatch", 1), ("read", 1), ("log", 1),
        ("batch", 2), ("dispatch", 2),
        ("batch", 3), ("dispatch", 3), ("read", 2), ("log", 2),
        ("batch", 4), ("dispatch", 4), ("read", 3), ("log", 3),
        ("read", 4), ("log", 4), ("save", 4),
    ]  # fmt: skip
    assert [line["step"] for line in recorder.lines()] == [1, 2, 3, 4]


def test_the_first_step_logs_the_time_from_the_command_by_phase(tmp_path):
    position.enter("plan")
    recorder = Recorder(tmp_path, "train.steps=3", "checkpoint.every=0")
    assert recorder.run() == 0
    first, *others = recorder.lines()
    phases = [name.split("_")[1] for name in first if name.startswith("start_")]
    assert phases == ["import", "plan", "data", "step"]
    assert not any(name.startswith("start_") for line in others for name in line)
    (words,) = [words for _, words in recorder.order("say") if words.startswith("first step")]
    assert [part.split()[-2] for part in words.split(", ")] == ["import", *phases[1:]]


def test_what_looks_at_the_state_reads_its_step_first(tmp_path):
    often = ["train.eval_every=3", "train.eval_steps=1", "checkpoint.every=2", "train.steps=5"]
    recorder = Recorder(tmp_path, *often, "train.evaluate_every=4")
    assert recorder.run() == 0
    assert recorder.order("dispatch", "read", "evaluate", "tasks", "log", "save") == [
        ("dispatch", 1), ("read", 1), ("log", 1),
        ("dispatch", 2), ("read", 2), ("log", 2), ("save", 2),
        ("dispatch", 3), ("read", 3), ("evaluate", 3), ("log", 3),
        ("dispatch", 4), ("read", 4), ("tasks", 4), ("log", 4), ("save", 4),
        ("dispatch", 5), ("read", 5), ("evaluate", 5), ("tasks", 5), ("log", 5), ("save", 5),
    ]  # fmt: skip
    assert recorder.position == 5 * SAMPLES
    lines = {line["step"]: line for line in recorder.lines()}
    assert [step for step, line in lines.items() if "eval_loss" in line] == [3, 5]
    found = {step: line["tasks/one/acc"] for step, line in lines.items() if "tasks/one/acc" in line}
    assert found == {4: 0.4, 5: 0.5}


@pytest.mark.parametrize("when", [("batch", 3), ("dispatch", 3), ("read", 2)])
def test_a_signal_dispatches_no_more(tmp_path, when):
    recorder = Recorder(tmp_path, "train.steps=9", "checkpoint.every=0", signal_at=when)
    assert recorder.run() == 128 + signal.SIGTERM
    assert recorder.order("dispatch")[-1] == ("dispatch", 3)
    assert recorder.order("read", "save")[-2:] == [("read", 3), ("save", 3)]
    assert recorder.position == 3 * SAMPLES
    started, stopped = [message for _, message in recorder.order("say")]
    assert started.startswith("first step after ")
    assert stopped == "SIGTERM: stopped after step 3, which is being saved"
    assert [line["step"] for line in recorder.lines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("first", "again"),
    [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGTERM"), ("SIGHUP", "SIGHUP"), ("SIGINT", "SIGTERM")],
)
def test_a_signal_that_comes_again_loses_no_save(tmp_path, monkeypatch, first, again):
    """Launchers signal a process and its group; the second signal comes during the save."""
    recorder, (first, again) = Recorder(tmp_path), (getattr(signal, n) for n in (first, again))

    def save(step, parts, meta):
        os.kill(os.getpid(), again)
        os.kill(os.getpid(), again)
        recorder.events.append(("save", step))

    monkeypatch.setattr(recorder, "save", save)
    recorder.events = Events(("batch", 2), first)
    assert recorder.run() == 128 + first
    assert recorder.order("save") == [("save", 2)]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]


def test_a_second_ctrl_c_interrupts(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.events = Events(("batch", 2), signal.SIGINT)
    monkeypatch.setattr(recorder, "save", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        recorder.run()


def test_a_signal_while_the_last_step_is_saved_loses_nothing(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, "train.steps=2")
    monkeypatch.setattr(
        recorder, "is_written", lambda _: os.kill(os.getpid(), signal.SIGTERM) is None
    )
    assert recorder.run() == 0


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        recorder = Recorder(tmp_path, "train.steps=3")
        recorder.events = Events(("batch", 2), signal.SIGHUP)
        assert recorder.run() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("every", "late"), [(0, 1), (3, 0)])
@pytest.mark.parametrize("loss", [np.nan, -np.inf])
def test_of_a_loss_that_is_no_number_the_state_before_it_is_saved(tmp_path, every, late, loss):
    """Whether or not another step was dispatched meanwhile, which changed nothing."""
    recorder = Recorder(tmp_path, "train.steps=9", f"checkpoint.every={every}", losses={3: loss})
    assert recorder.run() == 1
    assert recorder.order("dispatch")[-1] == ("dispatch", 3 + late)
    assert recorder.order("save") == [("save", 2)]
    assert recorder.position == 2 * SAMPLES
    (_, stopped), (_, saved) = recorder.events[-2:]
    assert f"at step 3, samples {2 * SAMPLES}..{3 * SAMPLES - 1} of" in stopped
    assert saved == "the parameters of step 2 are saved"
    assert [(line["step"], line["loss"]) for line in recorder.lines()] == [
        (1, 1.0), (2, 1.0), (3, None)
    ]  # fmt: skip


def timed(tmp_path, monkeypatch, **takes):
    """Return the log of six steps with a clock that each event advances by the given seconds."""
    recorder = Recorder(
        tmp_path, "train.steps=6", "checkpoint.every=3", "train.eval_every=3", "train.eval_steps=1"
    )
    now = lambda: sum(takes.get(event[0], 0) for event in recorder.events)  # noqa: E731
    for module in (loop, unread):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    assert recorder.run() == 0
    return recorder.lines()


def test_seconds_are_of_steps_alone(tmp_path, monkeypatch):
    """Without held-out losses, saves and the first log; a step ends when its loss is read."""
    lines = timed(tmp_path, monkeypatch, read=1.0, evaluate=50.0, save=100.0, load=30.0)
    assert [line["step_seconds"] for line in lines] == [1.0] * 6


def test_seconds_of_batches_held_out_losses_and_saves(tmp_path, monkeypatch):
    """Seconds of the save after step 3 are logged with step 4, which follows it."""
    lines = timed(tmp_path, monkeypatch, batch=2.0, evaluate=50.0, save=100.0)
    assert [line["data_seconds"] for line in lines] == [2.0] * 6
    # the batch of a held-out loss takes time too
    assert {line["step"]: line["eval_seconds"] for line in lines if "eval_seconds" in line} == {
        3: 52.0, 6: 52.0
    }  # fmt: skip
    assert {line["step"]: line["save_seconds"] for line in lines if "save_seconds" in line} == {
        4: 100.0
    }


def test_so_many_steps_in_a_row_may_be_left_out(tmp_path):
    """Two may be skipped in a row, here 3 and 4, then 6; of 8, 9 and 10 the last stops the run."""
    losses = dict.fromkeys((3, 4, 6, 8, 9, 10), np.nan)
    settings = ["train.steps=12", "train.skip_non_finite=2", "checkpoint.every=0"]
    recorder = Recorder(tmp_path, *settings, losses=losses)
    assert recorder.run() == 1
    assert recorder.order("save") == [("save", 9)]
    assert recorder.position == 9 * SAMPLES
    said = [message for _, message in recorder.order("say") if " at step " in message]
    steps = [message.split(": ")[0].split()[-1] for message in said[:-1]]
    assert steps == ["3", "4", "6", "8", "9"]
    assert "at step 4: left out, 2 in a row of at most train.skip_non_finite=2" in said[1]
    assert "at step 10, samples" in said[-1]
    assert [line["skipped_steps"] for line in recorder.lines()] == [0, 0, 1, 2, 2, 3, 3, 4, 5, 5]
    updates = [line["lr"] for line in recorder.lines()]  # before the step, so of its own rate
    assert updates == [0, 1, 2, 2, 2, 3, 3, 4, 4, 4]


@pytest.mark.extended
@pytest.mark.slow(unless=["parallel.pp=2"])
@pytest.mark.parametrize("mesh", ["parallel.pp=1", "parallel.pp=2"])
def test_the_step_after_one_that_is_not_finite_changes_nothing(tmp_path, mesh):
    """On devices: the batch of step 3 has no finite loss, that of step 4 has."""

    def broken(position, **sizes):
        for step, batch in enumerate(batches(position, **sizes), start=1):
            yield (
                batch | {"positions": np.full_like(batch["positions"], NOT_FINITE)}
                if step == 3
                else batch
            )

    settings = [mesh, "optimizer.decay=constant", "checkpoint.every=0"]
    bad, good = tmp_path / "bad", tmp_path / "good"
    said = []
    trainer = trainer_of(*settings, "train.steps=9")
    assert run(trainer, bad, data=broken) == 1
    assert run(trainer_of(*settings, "train.steps=2"), good) == 0
    assert complete(bad) == complete(good) == [2]
    (got, meta), (want, other) = restored(trainer, bad), restored(trainer, good)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert meta["position"] == other["position"] == 2 * trainer.samples_per_step
    assert list(metrics(bad)) == [1, 2, 3]
    assert run(trainer, bad, said.append) == 0
    assert "resumed from step 2" in said[0]
    assert list(metrics(bad)) == list(range(1, 10))
    assert all(np.isfinite(line["loss"]) for line in metrics(bad).values())
