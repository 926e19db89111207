"""Loggers besides metrics.jsonl: TensorBoard, Prometheus, and Weights & Biases."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.runtime.directory import WriteGuard
from jaxpipe.runtime.spool import local_folder

Shown = Mapping[str, float | np.ndarray]  # by name: a scalar, or finite numbers for a histogram


class Logger(Protocol):
    """A logger of numbers by step. Its methods raise `OSError` where they cannot write."""

    name: str  # used in messages

    def show(self, step: int, values: Shown) -> None:
        """Log one step's numbers."""

    def rewind(self, last_step: int) -> None:
        """Drop or set aside the steps after `last_step`, from which the run goes on."""

    def close(self) -> None:
        """Write pending records and close."""


class WeightsAndBiases:
    """A wandb run with its files in `<run.dir>/wandb`.

    Every start and every rollback of a training run is a separate wandb run in a group named after
    the training run, so records from before it stay. The environment variable WANDB_MODE, which
    clusters without internet access set, overrides `log.wandb`. Raises `ConfigError` where wandb
    fails.
    """

    def __init__(self, config: Config, last_step: int):
        import wandb

        self.name = f"{config.run.dir}/wandb"
        self._config, self._wandb = config, wandb
        self._run = self._started(last_step)

    def _started(self, last_step: int) -> Any:
        config, wandb = self._config, self._wandb
        name = Path(config.run.dir).resolve().name
        mode = os.environ.get("WANDB_MODE") or config.log.wandb
        try:
            return wandb.init(
                project=config.log.wandb_project,
                group=name,
                name=f"{name} from step {last_step}",
                dir=str(local_folder(config.run.dir)),
                mode=mode,
                config=msgspec.to_builtins(config),
                settings=wandb.Settings(console="off"),  # wandb would disturb the progress line
            )
        except wandb.Error as error:
            raise ConfigError(
                f"log.wandb={mode!r} is refused by wandb ({first_line(error)}): run "
                f"`wandb login`, or use log.wandb=offline and `wandb sync` later."
            ) from error

    def show(self, step: int, values: Shown) -> None:
        """Log one step's values as scalars and histograms."""
        shown = {
            name: self._wandb.Histogram(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        with self._its_errors():
            self._run.log(shown, step=step)

    def rewind(self, last_step: int) -> None:
        """Begin another wandb run, since wandb takes no earlier step."""
        self.close()
        try:
            self._run = self._started(last_step)
        except ConfigError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send pending records and finish the wandb run."""
        with self._its_errors():
            self._run.finish()

    @contextlib.contextmanager
    def _its_errors(self) -> Iterator[None]:
        try:
            yield
        except self._wandb.Error as error:
            raise OSError(first_line(error)) from error


def open_loggers(config: Config, last_step: int, guard: WriteGuard | None = None) -> list[Logger]:
    """The configured loggers, which continue after `last_step`.

    A logger whose files cannot be written is omitted and reported by `guard`.
    """
    guard, loggers = guard or WriteGuard(print), list[Logger]()
    if config.log.tensorboard:
        from jaxpipe.training.tensorboard import TensorBoard

        loggers.append(TensorBoard(config, last_step))
    if config.log.prometheus_port:
        from jaxpipe.training.prometheus import Prometheus  # needs the extra `prometheus`

        loggers.append(Prometheus(config))
    if config.log.wandb:
        with guard.attempt(f"{config.run.dir}/wandb"):
            loggers.append(WeightsAndBiases(config, last_step))
    return loggers
