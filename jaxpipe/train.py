"""`python -m jaxpipe.train CONFIG [section.key=value ...]`: train, or resume, one run.

Exit codes: 0 done; 1 stopped at a loss or gradient that is not finite; 2 bad input; 3 another
process of the run is gone; 128 + n stopped by signal n (130: Ctrl-C, 138: SIGUSR1, 143: SIGTERM),
after the step in progress was finished and saved.
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxpipe import config as configs
from jaxpipe import processes
from jaxpipe.checks import validate
from jaxpipe.config import Config, ConfigError
from jaxpipe.runtime import use_cpu_devices, use_gpu_memory
from jaxpipe.schedule import ScheduleError

if TYPE_CHECKING:
    from jaxpipe.checkpoint import Checkpoints
    from jaxpipe.data import Data
    from jaxpipe.metrics import MetricsLog
    from jaxpipe.progress import Progress
    from jaxpipe.trainer import State, Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.train", description=__doc__)
    parser.add_argument("config", help="a TOML file, such as configs/quickstart.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--print-config", action="store_true", help="print it resolved, and stop")
    arguments = parser.parse_args(argv)
    try:
        config = configs.load(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(configs.to_toml(config), end="")
            return 0
        return train(config)
    except (ConfigError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the newest checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if processes.started() == 1:
            raise
        _leave_others(error)


def _leave_others(error: Exception) -> NoReturn:
    """End this process of several at once: to meet the others on leaving could take for ever."""
    traceback.print_exc()
    print(
        f"error: this process cannot go on without the others ({str(error).splitlines()[0][:200]}):"
        f" one of them failed; the same command, also with fewer processes, goes on from the "
        f"newest checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(3)


def train(config: Config) -> int:
    """Train as configured and return the exit code; `ConfigError` comes before anything is done."""
    validate(config, devices=processes.started() * config.runtime.cpu_devices or None)
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    use_gpu_memory()
    processes.join()
    # Only now may jax be imported: it reads its settings when it starts.
    import jax

    from jaxpipe.checkpoint import Checkpoints, Keying
    from jaxpipe.data import open_data
    from jaxpipe.metrics import MetricsLog
    from jaxpipe.progress import Progress
    from jaxpipe.summary import summary
    from jaxpipe.trainer import Trainer

    hosts_devices = processes.devices_of_host()
    validate(config, devices=jax.device_count(), devices_of_host=hosts_devices)
    directory = Path(config.run.dir)
    trainer = Trainer(config)
    try:
        with processes.first_before_others("data"):
            data = open_data(
                config.data,
                seq_len=config.train.seq_len,
                vocab_size=config.model.vocab_size,
                seed=config.train.seed,
                directory=directory / "data",
            )
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}): make it a writable directory or "
            f"choose another run.dir."
        ) from error
    if config.train.eval_every:
        data.heldout.batches(0, **trainer.batch_shape).close()  # is there enough of it?
    with contextlib.ExitStack() as stack:
        shown = Progress(config.train.steps, config.log, silent=not processes.first())
        progress = stack.enter_context(shown)
        checkpoints = stack.enter_context(
            Checkpoints(
                directory / "checkpoints",
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
                asynchronous=config.checkpoint.asynchronous,
                keying=Keying(trainer.layout, trainer.sharding),
                say=progress.say,
            )
        )
        progress.say(summary(trainer))
        state, position = _start(trainer, data, checkpoints, progress.say)
        log = None
        if processes.first():
            last_step, tensorboard = int(state.step), config.log.tensorboard
            log = stack.enter_context(
                MetricsLog(directory, tensorboard=tensorboard, last_step=last_step)
            )
        return _Run(trainer, data, checkpoints, progress, log).loop(state, position)


def _start(
    trainer: "Trainer", data: "Data", checkpoints: "Checkpoints", say: Callable[[str], None]
) -> tuple["State", int]:
    """The newest checkpoint's state and data position, or a fresh state at position 0."""
    if trainer.config.checkpoint.resume == "none":
        if checkpoints.steps:
            raise ConfigError(
                f"{checkpoints.directory} holds checkpoints of steps {checkpoints.steps} but "
                f"checkpoint.resume='none': use resume='auto' to continue, or another run.dir."
            )
        return trainer.init(), 0
    shapes = trainer.state_shapes
    found = checkpoints.restore(shapes._asdict(), say)
    if found is None:
        return trainer.init(), 0
    restored, meta = found
    if meta["data"] != data.train.fingerprint:
        raise ConfigError(
            f"checkpoint {meta['step']} was trained on {meta['data']} but this run reads "
            f"{data.train.fingerprint}: give the same [data], train.seq_len and train.seed, or "
            f"another run.dir."
        )
    say(f"resumed from step {meta['step']} (saved with {meta['layout']})")
    return type(shapes)(**restored), meta["position"]


@dataclass(frozen=True)
class _Run:
    """A run that has started: the loop, and what it does at a step."""

    trainer: "Trainer"
    data: "Data"
    checkpoints: "Checkpoints"
    progress: "Progress"
    log: "MetricsLog | None"  # of the first process

    def loop(self, state: "State", position: int) -> int:
        """Step until the last one, a signal, or a loss that is not finite; return the exit code."""
        trainer, train = self.trainer, self.trainer.config.train
        done = int(state.step)
        if done >= train.steps:
            self.progress.say(f"nothing to do: train.steps={train.steps} is reached; raise it")
        batches = self.data.train.batches(position, **trainer.batch_shape)
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
                    return 128 + number
        return 0

    def _record(self, step: int, values: dict[str, float], *, first: bool) -> None:
        if self.log:
            self.log.write(step, values)
        self.progress.update(step, values, first=first)

    def _save(self, state: "State", position: int) -> None:
        config = self.trainer.config
        parallel = config.parallel
        self.checkpoints.save(
            int(state.step),
            state._asdict(),
            {
                "position": position,
                "data": self.data.train.fingerprint,
                "layout": (
                    f"pp={parallel.pp} dp={parallel.dp} tp={parallel.tp} {parallel.schedule}"
                ),
                "config": configs.to_toml(config),
            },
        )

    def _heldout_loss(self, state: "State") -> float:
        """Mean over at most `train.eval_steps` batches, in nats a token."""
        trainer = self.trainer
        batches = self.data.heldout.batches(0, **trainer.batch_shape)
        with contextlib.closing(batches):
            losses = [
                float(trainer.eval_step(state.params, trainer.put(batch)))
                for batch in itertools.islice(batches, trainer.config.train.eval_steps)
            ]
        return sum(losses) / len(losses)

    def _stop_at_non_finite(
        self, state: "State", step: int, position: int, values: dict[str, float]
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


if __name__ == "__main__":
    sys.exit(main())
