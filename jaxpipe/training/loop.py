"""The loop of a run that has started: steps, logs, held-out losses, saves, and when to stop."""

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxpipe.checkpoint import Checkpoints
from jaxpipe.data import Data
from jaxpipe.runtime import processes
from jaxpipe.training.metrics import MetricsLog
from jaxpipe.training.progress import Progress
from jaxpipe.training.start import describe
from jaxpipe.training.trainer import State, Trainer


@dataclass(frozen=True)
class Run:
    """A run that has started: the loop, and what it does at a step."""

    trainer: Trainer
    data: Data
    checkpoints: Checkpoints
    progress: Progress
    log: MetricsLog | None  # of the first process

    def loop(self, state: State, position: int) -> int:
        """Step until the last one, a signal, or a loss that is not finite; return the exit code."""
        trainer, train = self.trainer, self.trainer.config.train
        done = int(state.step)
        if done >= train.steps:
            self.progress.say(f"nothing to do: train.steps={train.steps} is reached; raise it")
            return 0
        batches = self.data.train.batches(position, **trainer.config.batch_shape)
        with contextlib.closing(batches), _signals() as received:
            for step in range(done + 1, train.steps + 1):
                start = time.perf_counter()
                state, metrics = trainer.train_step(state, trainer.put(next(batches)))
                values = {name: float(value) for name, value in metrics.items()}
                values |= trainer.rates(step, time.perf_counter() - start)
                if int(state.step) != step:
                    self._record(step, values, first=step == done + 1)
                    return self._stop_at_non_finite(state, step, position, values)
                position += trainer.samples_per_step
                if train.eval_every and (step % train.eval_every == 0 or step == train.steps):
                    values["eval_loss"] = self._heldout_loss(state)
                self._record(step, values, first=step == done + 1)
                every = trainer.config.checkpoint.every or train.steps
                number = processes.largest(max(received, default=0))
                if number or step % every == 0 or step == train.steps:
                    self._save(state, position)
                if number:
                    name = signal.Signals(number).name
                    self.progress.say(f"{name}: stopped after step {step}, which is being saved")
                    return self._end(128 + number, step)
        return self._end(0, train.steps)

    def _record(self, step: int, values: dict[str, float], *, first: bool) -> None:
        if self.log:
            self.log.write(step, values)
        self.progress.update(step, values, first=first)

    def _save(self, state: State, position: int) -> None:
        meta = describe(self.trainer, self.data, position)
        self.checkpoints.save(int(state.step), state.parts(), meta)

    def _end(self, code: int, step: int) -> int:
        """The exit code once all is saved, which is another where that failed."""
        return code if self.checkpoints.written(step) else 4

    def _heldout_loss(self, state: State) -> float:
        """Mean over at most `train.eval_steps` batches, in nats a token."""
        trainer = self.trainer
        batches = self.data.heldout.batches(0, **trainer.config.batch_shape)
        with contextlib.closing(batches):
            losses = [
                float(trainer.eval_step(state, trainer.put(batch)))
                for batch in itertools.islice(batches, trainer.config.train.eval_steps)
            ]
        return sum(losses) / len(losses)

    def _stop_at_non_finite(
        self, state: State, step: int, position: int, values: dict[str, float]
    ) -> int:
        self._save(state, position)
        last = position + self.trainer.samples_per_step - 1
        self.progress.say(
            f"error: loss {values['loss']}, gradient norm {values['grad_norm']} at step {step}, "
            f"samples {position}..{last} of the training order: stopped before the update; the "
            f"parameters of step {step - 1} are saved."
        )
        return 1


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The first Ctrl-C, SIGTERM or SIGUSR1 is noted in the list; another Ctrl-C interrupts."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in stops}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
