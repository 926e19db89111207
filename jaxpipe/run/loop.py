"""The training loop: steps, logs, held-out losses, saves, and when to stop."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from jaxpipe.checkpoint import CheckpointStore
from jaxpipe.config import ConfigError
from jaxpipe.data.batches import DocumentLengths, join_batches
from jaxpipe.data.read_ahead import PROGRAMS, ReadAhead, failure_of
from jaxpipe.data.sources import RunData
from jaxpipe.run.corruption import CorruptionCheck
from jaxpipe.run.exports import Exports
from jaxpipe.run.heldout import heldout_loss
from jaxpipe.run.measure.bubble import BubbleMeter
from jaxpipe.run.measure.recording import RecordingWindow
from jaxpipe.run.measure.stragglers import Stragglers
from jaxpipe.run.pending_steps import Dispatched, UnreadSteps
from jaxpipe.run.rollback import Failure, can_roll_back, describe_loss, roll_back
from jaxpipe.run.signals import stop_signals
from jaxpipe.run.start import DataPosition, describe
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.progress import Progress
from jaxpipe.run.watch.summary import closing_words
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.command import code_of
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.spool import Spool
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.fused import programs
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class TrainLoop:
    """The training loop of a started run.

    `log` is None except on the first process of `group`; `exports` is told of every save, and
    `spool` uploads logs before it, unless they are None; `tasks` returns further numbers of a
    state, every `train.evaluate_every` steps.
    """

    trainer: Trainer
    data: RunData
    checkpoints: CheckpointStore
    progress: Progress
    log: MetricsLog | None
    group: Group
    exports: Exports | None = None
    tasks: Callable[[State], dict[str, float]] | None = None
    spool: Spool | None = None

    @cached_property
    def steps(self) -> CompiledSteps:
        """The compiled steps."""
        return CompiledSteps(self.trainer, self.group, self.progress.say)

    @cached_property
    def stragglers(self) -> Stragglers:
        """What names the process that slows the run."""
        return Stragglers(self.trainer, self.progress.say)

    @cached_property
    def corruption(self) -> CorruptionCheck:
        """The check for devices that compute wrong numbers."""
        return CorruptionCheck(self.trainer, self.group, self.progress.say)

    def loop(self, state: State, seen: DataPosition) -> int:
        """Train until the last step, a signal, or too many skipped steps; return the exit code.

        The metrics of a step are read after the next step is dispatched, so devices never wait for
        the host. Before the state is used (held-out loss, save, end), all metrics are read.
        """
        config, done = self.trainer.config, int(state.step)
        if done >= config.train.steps:
            last = f"train.steps={config.train.steps}"
            self.progress.say(f"nothing to do: {last} is reached; raise it")
            return ExitCode.DONE
        window = RecordingWindow(config, self.progress.say)
        with self.steps, self.stragglers, window, stop_signals() as received:
            window.turn(done)
            while not isinstance(end := self._train(state, seen, window, received), int):
                if not can_roll_back(self.trainer.config, self.checkpoints, end):
                    return self._stop(end)
                state, seen = roll_back(self.trainer, self.checkpoints, end, self.progress.say)
                if self.exports:
                    self.exports.remove_after(int(state.step))
                if self.log:
                    self.log.rewind(int(state.step))
            return end

    def _train(
        self, state: State, seen: DataPosition, window: RecordingWindow, received: list[int]
    ) -> int | Failure:
        """Train from a state on; return the exit code, or the step that must not be passed over."""
        trainer, train = self.trainer, self.trainer.config.train
        batches = self.data.train.batches(seen.position, **trainer.sharder.sizes)
        if isinstance(batches, ReadAhead):
            batches.kept = PROGRAMS * train.fused_steps
        unread, spent, ran = UnreadSteps(), dict[str, float](), set[int]()
        meter = BubbleMeter(trainer, self.steps, self.progress.say, self.stragglers.note_ticks)
        was_interrupted = True  # whether something else happened since the last program
        with contextlib.closing(batches):
            for program in programs(train, int(state.step)):
                started = time.perf_counter()
                position.enter("data", program.start)
                with _timed(spent, "data_seconds"):
                    batch = trainer.put(join_batches(batches, len(program)), seen.samples)
                if wrong := self._check(program.start, state, batch):
                    return self._log_all_but(0, unread, state) or self._stop_at_corruption(wrong)
                was_interrupted |= self.corruption.is_due(program.start)
                position.enter("step")
                dispatched = time.perf_counter()
                state, metrics = meter.run(program, state, batch)
                is_recorded = "bubble" in metrics
                self.stragglers.note(
                    program, started, dispatched, metrics["loss"],
                    is_regular=not (was_interrupted or is_recorded),
                )  # fmt: skip
                first = len(program) not in ran
                ran.add(len(program))
                # What loads at the first log must not count as the next step's time.
                waits = first or window.turns_at(program[-1])
                was_interrupted = is_recorded or waits
                for step in program:
                    before, (seen, contents) = seen, self._see(seen)
                    how = step, program, before, seen, contents, metrics, started, spent, first
                    unread.add(Dispatched(*how))
                    spent = {}
                self.steps.look_ahead(self.data.train, before.position, train.steps - step)
                newest = 0 if waits else len(program)
                if failed := self._log_all_but(newest, unread, state):
                    return failed
                window.turn(step)
                failure = failure_of(batches, train.steps - step)
                code = _stop_code(received, failure, seen)
                evaluates = self._evaluates_at(step) or self._tasks_at(step)
                saves = self._saves_due(step, code)
                if not (evaluates or saves):
                    continue
                was_interrupted = True
                if failed := self._log_all_but(0, unread, state):
                    return failed
                if saves:
                    with _timed(spent, "save_seconds"):
                        for save in saves:
                            save(step, state, seen)
                if code:
                    self._say_why(code, step, failure)
                    return self._end(code, step)
            return self._end(ExitCode.DONE, train.steps)

    def _say_why(self, code: int, step: int, error: Exception | None) -> None:
        """Say why the run stops; each process whose data failed says so."""
        reason = str(error or "data of another process cannot be read")
        if code > 128:
            reason = signal.Signals(code - 128).name
        elif error:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        self.progress.say(f"{reason}: stopped after step {step}, which is being saved")

    def _evaluates_at(self, step: int) -> bool:
        train = self.trainer.config.train
        return bool(train.eval_every) and (step % train.eval_every == 0 or step == train.steps)

    def _tasks_at(self, step: int) -> Callable[[State], dict[str, float]] | None:
        """The tasks, if they are evaluated after this step."""
        train = self.trainer.config.train
        due = self.tasks and (step % train.evaluate_every == 0 or step == train.steps)
        return self.tasks if due else None

    def _saves_due(self, step: int, code: int) -> list[Callable[[int, State, DataPosition], None]]:
        """What saves a step, after which the run stops if there is an exit code."""
        how, steps = self.trainer.config.checkpoint, self.trainer.config.train.steps
        saves: list[Callable[[int, State, DataPosition], None]] = []
        if how.local_every and step % how.local_every == 0 and step != steps:
            saves.append(self._save_locally)
        if code or step % (how.every or steps) == 0 or step == steps:
            saves.append(self._save)
        return saves

    def _log_all_but(self, newest: int, unread: UnreadSteps, state: State) -> Failure | None:
        """Read and log all but the `newest` steps; return the step that stops the run, if any."""
        train = self.trainer.config.train
        limit = train.skip_non_finite
        while len(unread) > newest:
            position.enter("step", unread.oldest)
            dispatched, values, seconds = unread.read()
            start = {} if position.finished.step else position.seconds_by_phase()
            position.finish(dispatched.step, seconds * len(dispatched.program))
            skipped, not_finite = values["skipped_steps"], values["not_finite_in_row"]
            if not (limit or train.spike_sigma or skipped):
                del values["skipped_steps"], values["not_finite_in_row"]
            spikes = values.get("spikes_in_row", 0)
            stops = not_finite > limit or spikes > train.spike_limit
            if (not_finite or spikes or not values["target_tokens"]) and not stops:
                skipped -= 1  # this step
            values |= dispatched.spent | self.stragglers.take()
            values |= self.trainer.rates(
                dispatched.step, dispatched.after.tokens, seconds, skipped, dispatched.contents
            )
            if self._evaluates_at(dispatched.step) and not stops:
                with _timed(values, "eval_seconds"):
                    values["eval_loss"] = self._or_save(dispatched, state, self._heldout_loss)
            if (tasks := self._tasks_at(dispatched.step)) and not stops:
                position.enter("tasks", dispatched.step)
                with _timed(values, "evaluate_seconds"):
                    values |= self._or_save(dispatched, state, tasks)
            if self.log:
                taken = {f"start_{phase}_seconds": seconds for phase, seconds in start.items()}
                self.log.write(dispatched.step, values | taken)
            if start:
                self.progress.say(position.describe_start(start))
            self.progress.update(dispatched.step, values, first=dispatched.first)
            if stops:
                return Failure(state, dispatched, values)
            if not values["target_tokens"]:
                self.progress.say(f"step {dispatched.step} has no target: it made no update")
            elif not math.isfinite(values["loss"] + values["grad_norm"]):
                self.progress.say(
                    f"{describe_loss(values)} at step {dispatched.step}: left out, "
                    f"{not_finite} in a row of at most train.skip_non_finite={limit}"
                )
            elif spikes:
                self.progress.say(
                    f"{describe_loss(values)} at step {dispatched.step}: left out as a spike, "
                    f"{spikes} in a row of at most train.spike_limit={train.spike_limit}"
                )
        return None

    def _or_save(self, dispatched: Dispatched, state: State, evaluate: Callable[[State], T]) -> T:
        """The result of an evaluation; if it fails, the state is saved before the run ends."""
        try:
            return evaluate(state)
        except Exception as error:
            if isinstance(error, ConfigError) or self.group.count == 1:  # it fails in all
                self._save(dispatched.step, state, dispatched.after)
                self.checkpoints.is_written(dispatched.step)
            raise

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
        if self.spool:
            self.spool.upload()  # a run that goes on from the checkpoint has the log up to it
        self.checkpoints.save(step, state.parts(), meta)
        if self.exports:
            self.exports.add(step)

    def _save_locally(self, step: int, state: State, seen: DataPosition) -> None:
        position.enter("save", step)
        meta = describe(self.trainer, self.data, seen, state.guard)
        self.checkpoints.save_locally(step, state.parts(), meta)

    def _end(self, code: int, step: int) -> int:
        """Wait for the save of `step`; return `code`, or `NOT_SAVED` if it could not be saved."""
        position.enter("save", step)
        if not self.checkpoints.is_written(step):
            self.progress.say(
                f"step {step} is not saved in {self.checkpoints.directory}, for the reason "
                f"above: the same command goes on from the newest checkpoint there"
            )
            return ExitCode.NOT_SAVED
        if code == ExitCode.FAILED:
            self.progress.say(f"the parameters of step {step} are saved")
        if code == 0:
            self.checkpoints.clear_local()
            config, carried = self.trainer.config, self.checkpoints.carried
            self.progress.say(closing_words(config, carried, step))
        return code

    def _heldout_loss(self, state: State) -> float:
        eval_step, data = self.steps.eval_step, self.data.heldout
        return heldout_loss(self.trainer, self.group, eval_step, data, state, self.progress.say)

    def _check(self, step: int, state: State, batch: Any) -> str:
        """What a check of the step finds wrong with the devices; "" if the run goes on."""
        if not self.corruption.is_due(step):
            return ""
        position.enter("check", step)
        wrong = self.corruption.find(step, state, batch)
        if wrong and self.trainer.config.train.on_corruption == "warn":
            self.progress.say(f"warning: {wrong}; the run goes on (train.on_corruption)")
            return ""
        return wrong

    def _stop_at_corruption(self, wrong: str) -> int:
        """Save nothing, since the state may be wrong; return the exit code."""
        every = self.trainer.config.train.corruption_check_every
        self.checkpoints.clear_local()
        self.progress.say(
            f"error: {wrong}: stopped, and nothing is saved; leave the host of the device out, and "
            f"go on from a checkpoint that is older than the last {every} steps"
        )
        return ExitCode.CORRUPTION

    def _stop(self, failed: Failure) -> int:
        """Save the state before the step, which later steps left unchanged.

        Returns `FAILED`, or `NOT_SAVED` if the state could not be saved.
        """
        dispatched, step = failed.dispatched, failed.step
        state = failed.state._replace(guard=failed.state.guard.ready())
        self._save(step - 1, state, dispatched.before)
        self.progress.say(
            f"error: {failed.reason(self.trainer.config.train)}, samples "
            f"{dispatched.before.position}..{dispatched.after.position - 1} of the training order: "
            f"stopped before the update of step {step}"
        )
        return self._end(ExitCode.FAILED, step - 1)


def _stop_code(received: list[int], failure: Exception | None, seen: DataPosition) -> int:
    """The exit code with which all processes stop here, for a signal or for failed data; or 0."""
    wanted = 128 + max(received) if received else code_of(failure) if failure else 0
    # Unlike the number of the step, the position also grows over a rollback.
    return processes.stops_after(seen.position, wanted)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the time of the body [s] as `seconds[name]`."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
