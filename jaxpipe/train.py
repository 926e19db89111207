"""`python -m jaxpipe.train CONFIG [section.key=value ...]`: train, or resume, one run.

Exit codes: 0 done; 1 stopped at a loss or gradient that is not finite; 2 bad input; 128 + n stopped
by signal n (130: Ctrl-C, 143: SIGTERM), after the step in progress was finished and saved.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.runtime import use_cpu_devices
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


def train(config: Config) -> int:
    """Train as configured and return the exit code; raises `ConfigError` before anything is done."""
    configs.validate(config, devices=config.runtime.cpu_devices or None)
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    # Only now may jax be imported: it reads its settings when it starts.
    import jax

    from jaxpipe.checkpoint import Checkpoints, Keying
    from jaxpipe.data import open_data
    from jaxpipe.metrics import MetricsLog
    from jaxpipe.progress import Progress
    from jaxpipe.summary import summary
    from jaxpipe.trainer import Trainer

    configs.validate(config, devices=jax.device_count())
    directory = Path(config.run.dir)
    trainer = Trainer(config)
    data = open_data(
        config.data,
        seq_len=config.train.seq_len,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        directory=directory / "data",
    )
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        keying=Keying(trainer.layout, trainer.mesh),
    )
    with checkpoints, Progress(config.train.steps, config.log) as progress:
        progress.show(summary(trainer))
        state, position = _start(trainer, data, checkpoints, progress.say)
        with MetricsLog(
            directory, tensorboard=config.log.tensorboard, resume_step=int(state.step)
        ) as log:
            return _loop(trainer, data, checkpoints, progress, log, state, position)


def _start(
    trainer: "Trainer", data: "Data", checkpoints: "Checkpoints", say: Callable[[str], None]
) -> tuple["State", int]:
    """The newest checkpoint's state and data position, or a fresh state at position 0."""
    state = trainer.init()
    if trainer.config.checkpoint.resume == "none":
        if checkpoints.steps:
            raise ConfigError(
                f"{checkpoints.directory} holds checkpoints of steps {checkpoints.steps} but "
                f"checkpoint.resume='none': use resume='auto' to continue, or another run.dir."
            )
        return state, 0
    found = checkpoints.restore(state._asdict(), say)
    if found is None:
        return state, 0
    restored, meta = found
    if meta["data"] != data.train.fingerprint:
        raise ConfigError(
            f"checkpoint {meta['step']} was trained on {meta['data']} but this run reads "
            f"{data.train.fingerprint}: give the same [data], train.seq_len and train.seed, or "
            f"another run.dir."
        )
    say(f"resumed from step {meta['step']} (saved with {meta['layout']})")
    return type(state)(**restored), meta["position"]


def _loop(
    trainer: "Trainer",
    data: "Data",
    checkpoints: "Checkpoints",
    progress: "Progress",
    log: "MetricsLog",
    state: "State",
    position: int,
) -> int:
    """Step, log, evaluate and save until the last step, a signal or a loss that is not finite."""
    config = trainer.config
    samples = batch_shape(config)["microbatches"] * batch_shape(config)["batch_size"]
    batches = data.train.batches(position, **batch_shape(config))
    with contextlib.closing(batches), _signals() as received:
        for step in range(int(state.step) + 1, config.train.steps + 1):
            start = time.perf_counter()
            state, metrics = trainer.train_step(state, trainer.put(next(batches)))
            values = {name: float(value) for name, value in metrics.items()}
            values |= trainer.rates(step, time.perf_counter() - start)
            finite = int(state.step) == step
            if finite:
                position += samples
                if _due(step, config.train.eval_every, config):
                    values["eval_loss"] = _heldout_loss(trainer, data, state)
            log.write(step, **values)
            progress.update(step, values)
            if not finite or received or _due(step, config.checkpoint.every or config.train.steps, config):
                checkpoints.save(int(state.step), state._asdict(), _meta(trainer, data, position))
            if not finite:
                progress.say(
                    f"error: loss {values['loss']}, gradient norm {values['grad_norm']} at step "
                    f"{step}, samples {position}..{position + samples - 1}: stopped before the "
                    f"update; step {step - 1} is saved."
                )
                return 1
            if received:
                progress.say(f"{signal.Signals(received[0]).name}: stopped after step {step}, saved")
                return 128 + received[0]
    return 0
