"""The training loop: steps, logs, held-out losses, saves, and when to stop."""

import contextlib
import itertools
import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpipe.checkpoint import CheckpointStore
from jaxpipe.data.batches import DocumentLengths
from jaxpipe.data.sources import RunData
from jaxpipe.runtime import position, processes
from jaxpipe.training.bubble import BubbleMeter
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.metrics import MetricsLog
from jaxpipe.training.progress import Progress
from jaxpipe.training.recording import Window
from jaxpipe.training.start import DataPosition, describe
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer


@dataclass(frozen=True)
class _Dispatched:
    """A dispatched step whose metrics have not been read."""

    step: int
    program: range  # numbers of all steps of its program
    before: DataPosition  # data position before the step
    after: DataPosition
    contents: DocumentLengths | None  # documents and padding of its rows; None: no padding
    metrics: dict[str, Any]  # stacked over the steps of its program if there are several
    started: float  # host time before its batch was read [s]
    spent: dict[str, float]  # host time since the previous step by purpose [s]
    first: bool  # whether the time of its program includes compilation

    def numbers(self) -> dict[str, Any]:
        """Wait for the step; return its metrics as numbers or nested lists."""
        found = {name: np.asarray(value) for name, value in self.metrics.items()}
        if len(self.program) > 1:
            found = {name: value[self.program.index(self.step)] for name, value in found.items()}
        found["target_tokens"] = found["target_tokens"].sum(dtype=np.int64)
        return {name: value.tolist() for name, value in found.items()}


@dataclass(frozen=True)
class Run:
    """The training loop of a started run; `log` is None except on the first process."""

    trainer: Trainer
    data: RunData
    checkpoints: CheckpointStore
    progress: Progress
    log: MetricsLog | None

    @cached_property
    def steps(self) -> CompiledSteps:
        """The compiled steps."""
        return CompiledSteps(self.trainer, self.progress.say)

    def loop(self, state: State, seen: DataPosition) -> int:
        """Train until the last step, a signal, or too many non-finite steps; return the exit code.

        The metrics of a step are read after the next step is dispatched, so devices never wait for
        the host. Before the state is used (held-out loss, save, end), all metrics are read.
        """
        trainer, train = self.trainer, self.trainer.config.train
        done = int(state.step)
        if done >= train.steps:
            self.progress.say(f"nothing to do: train.steps={train.steps} is reached; raise it")
            return 0
        batches = self.data.train.batches(seen.position, **trainer.feed.sizes)
        unread, spent, ran = _Unread(), {}, set()
        meter = BubbleMeter(trainer, self.steps, self.progress.say)
        window = Window(trainer.config, self.progress.say)
        with contextlib.closing(batches), self.steps, window, _signals() as received:
            window.turn(done)
            for program in _programs(done, train.steps, train.fused_steps):
                started = time.perf_counter()
                position.enter("data", program.start)
                with _timed(spent, "data_seconds"):
                    batch = trainer.put(_joined(batches, len(program)), seen.samples)
                position.enter("step")
                state, metrics = meter.run(program, state, batch)
                first = len(program) not in ran
                ran.add(len(program))
                for step in program:
                    before, (seen, contents) = seen, self._see(seen)
                    unread.add(
                        _Dispatched(
                            step, program, before, seen, contents, metrics, started, spent, first
                        )
                    )
                    spent = {}
                self.steps.look_ahead(self.data.train, before.position, train.steps - step)
                newest = 0 if window.turns_at(step) else len(program)
                if failed := self._log_all_but(newest, unread, state):
                    return self._stop_at_non_finite(state, *failed)
                window.turn(step)
                number = processes.stops_after(step, max(received, default=0))
                if not (number or self._evaluates_at(step) or self._saves_at(step)):
                    continue
                if failed := self._log_all_but(0, unread, state):
                    return self._stop_at_non_finite(state, *failed)
                if number or self._saves_at(step):
                    with _timed(spent, "save_seconds"):
                        self._save(step, state, seen)
                if number:
                    name = signal.Signals(number).name
                    self.progress.say(f"{name}: stopped after step {step}, which is being saved")
                    return self._end(128 + number, step)
            return self._end(0, train.steps)

    def _evaluates_at(self, step: int) -> bool:
        train = self.trainer.config.train
        return bool(train.eval_every) and (step % train.eval_every == 0 or step == train.steps)

    def _saves_at(self, step: int) -> bool:
        steps = self.trainer.config.train.steps
        return step % (self.trainer.config.checkpoint.every or steps) == 0 or step == steps

    def _log_all_but(
        self, newest: int, unread: "_Unread", state: State
    ) -> tuple[_Dispatched, dict[str, Any]] | None:
        """Read and log all but the `newest` steps; return the step that stops the run, if any."""
        limit = self.trainer.config.train.skip_non_finite
        while len(unread) > newest:
            position.enter("step", unread.oldest)
            dispatched, values, seconds = unread.read()
            position.finish(dispatched.step, seconds * len(dispatched.program))
            skipped = values["skipped_steps"]
            if not (limit or skipped):
                del values["skipped_steps"]
            values |= dispatched.spent
            values |= self.trainer.rates(
                dispatched.step, dispatched.after.tokens, seconds, skipped, dispatched.contents
            )
            stops = unread.not_finite > limit
            if self._evaluates_at(dispatched.step) and not stops:
                with _timed(values, "eval_seconds"):
                    values["eval_loss"] = self._heldout_loss(state)
            if self.log:
                self.log.write(dispatched.step, values)
            self.progress.update(dispatched.step, values, first=dispatched.first)
            if stops:
                return dispatched, values
            if not values["target_tokens"]:
                self.progress.say(f"step {dispatched.step} has no target: it made no update")
            elif unread.not_finite:
                self.progress.say(
                    f"{_not_finite(values)} at step {dispatched.step}: left out, "
                    f"{unread.not_finite} in a row of at most train.skip_non_finite={limit}"
                )
        return None

    def _see(self, seen: DataPosition) -> tuple[DataPosition, DocumentLengths | None]:
        """The data position after the next step, and the contents of that step."""
        config, samples = self.trainer.config, self.trainer.samples_per_step
        contents = self.data.train.contents(seen.position, samples) if config.pads else None
        tokens = config.tokens_per_step if contents is None else contents.tokens
        after = seen._replace(samples=seen.samples + samples, tokens=seen.tokens + tokens)
        return after, contents

    def _save(self, step: int, state: State, seen: DataPosition) -> None:
        position.enter("save", step)
        meta = describe(self.trainer, self.data, seen, state.guard)
        self.checkpoints.save(step, state.parts(), meta)

    def _end(self, code: int, step: int) -> int:
        """Wait for the save of `step`; return `code`, or 4 if the step could not be saved."""
        position.enter("save", step)
        if not self.checkpoints.is_written(step):
            self.progress.say(
                f"step {step} is not saved in {self.checkpoints.directory}: make room, and the "
                f"same command goes on from the newest checkpoint there"
            )
            return 4
        if code == 0:
            self.progress.say(self._closing_words(step))
        return code

    def _closing_words(self, step: int) -> str:
        """The message after the last step: where the results are, and what to do next."""
        saved = f"{self.trainer.config.run.dir}/checkpoints/{step}"
        return (
            f"done: {step} steps; saved in {saved}, numbers of all steps in "
            f"{self.trainer.config.run.dir}/metrics.jsonl; next: a larger train.steps to train on, "
            f"or `python -m jaxpipe.checkpoint export {saved} OUT_DIR` for transformers"
        )

    def _heldout_loss(self, state: State) -> float:
        """Mean loss over the targets of at most `train.eval_steps` batches [nats]; NaN: no targets.

        It does not depend on how rows are divided into batches and microbatches.
        """
        trainer, total, targets = self.trainer, 0.0, 0
        batches = self.data.heldout.batches(0, **trainer.feed.sizes)
        with contextlib.closing(batches):
            for batch in itertools.islice(batches, trainer.config.train.eval_steps):
                position.enter("evaluate")
                loss, counts = self.steps.eval_step(state, trainer.put(batch))
                count = int(np.asarray(counts).sum(dtype=np.int64))
                total, targets = total + float(loss) * count, targets + count
        if not targets:
            self.progress.say("no held-out row has a target: there is no held-out loss")
            return math.nan
        return total / targets

    def _stop_at_non_finite(
        self, state: State, dispatched: _Dispatched, values: dict[str, Any]
    ) -> int:
        """Save the state before the step, which later steps left unchanged; return 1."""
        step, first = dispatched.step, dispatched.before.position
        last = dispatched.after.position - 1
        self._save(step - 1, state, dispatched.before)
        self.progress.say(
            f"error: {_not_finite(values)} at step {step}, samples {first}..{last} of the "
            f"training order: stopped before the update; the parameters of step {step - 1} are "
            f"saved."
        )
        return 1


class _Unread:
    """A queue of dispatched steps whose metrics have not been read, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[_Dispatched] = deque()
        self._read_last = -math.inf  # host time when the previous program was read [s]
        self._seconds = 0.0  # time of a step of the program read last
        self.not_finite = 0  # consecutive non-finite steps up to the step read last

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> int:
        """The number of the oldest step."""
        return self._steps[0].step

    def add(self, dispatched: _Dispatched) -> None:
        """Append a step."""
        self._steps.append(dispatched)

    def read(self) -> tuple[_Dispatched, dict[str, Any], float]:
        """Wait for the oldest step; return it, its metrics and its time [s].

        The time counts from the end of the previous step, or from the step's own start if that is
        later. The times therefore add up to the run's time without held-out losses and saves.
        Steps of one program get equal shares of its time.
        """
        dispatched = self._steps.popleft()
        values = dispatched.numbers()
        of_targets = math.isfinite(values["loss"]) or not values["target_tokens"]
        if not (of_targets and math.isfinite(values["grad_norm"])):
            self.not_finite += 1
        elif values["target_tokens"]:
            self.not_finite = 0
        if dispatched.step == dispatched.program.start:
            before, self._read_last = self._read_last, time.perf_counter()
            taken = self._read_last - max(before, dispatched.started)
            self._seconds = taken / len(dispatched.program)
        return dispatched, values, self._seconds


def _programs(done: int, last: int, fused: int) -> Iterator[range]:
    """Yield the numbers of the steps of each program, from step `done` + 1 to `last`.

    A program has `fused` steps if the number of steps before it is a multiple of `fused` and at
    least `fused` steps are left; otherwise it has one step.

    >>> [list(program) for program in _programs(1, 7, 2)]
    [[2], [3, 4], [5, 6], [7]]
    """
    while done < last:
        count = fused if done % fused == 0 and done + fused <= last else 1
        yield range(done + 1, done + count + 1)
        done += count


def _joined(batches: Iterator[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The batches of the next `steps` steps, concatenated along the microbatches."""
    first, *others = itertools.islice(batches, steps)
    if not others:
        return first
    return {
        name: np.concatenate([leaf, *(o[name] for o in others)]) for name, leaf in first.items()
    }


def _not_finite(values: dict[str, Any]) -> str:
    return f"loss {values['loss']}, gradient norm {values['grad_norm']}"


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the time of the body [s] as `seconds[name]`."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Append received SIGINT, SIGTERM, SIGUSR1 and SIGHUP to the yielded list.

    A second Ctrl-C interrupts. The other signals never do, because launchers repeat them while a
    run is saved. SIGHUP means that the terminal is closed: output to it is redirected to /dev/null.
    SIGHUP stays ignored under `nohup`.
    """
    received: list[int] = []
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            with open(os.devnull, "w") as nowhere:
                for stream in terminals:
                    os.dup2(nowhere.fileno(), stream)
        if number == signal.SIGINT and number in received:
            signal.default_int_handler(number, frame)
        received.append(number)

    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in stops}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
