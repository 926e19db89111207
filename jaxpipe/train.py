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
