"""Loggers besides metrics.jsonl: TensorBoard, Prometheus, and Weights & Biases."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpipe.config import Config, ConfigError, first_line, to_builtins
from jaxpipe.runtime import position
from jaxpipe.runtime.storage.directory import WriteGuard
from jaxpipe.runtime.storage.spool import local_folder

# Seconds that a logger may take to start or to close, and to log a step.
_LONG_SECONDS, _SHORT_SECONDS = 120.0, 10.0
_KEY_ERRORS = ("UsageError", "AuthenticationError")  # of wandb
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


class Observer:
    """A logger that neither ends a run nor holds it up, whatever its package does.

    Every call runs in a thread. An error of any type becomes an `OSError`, and so does a call that
    takes too long; while it still runs, no other is made.

    Args:
      name: used in messages.
      open_logger: returns the logger; its `ConfigError` is raised as it is.
    """

    def __init__(self, name: str, open_logger: Callable[[], Logger]):
        self.name = name
        self._thread: threading.Thread | None = None
        self._logger = self._call(open_logger, _LONG_SECONDS)

    def show(self, step: int, values: Shown) -> None:
        """Log one step's numbers."""
        self._call(lambda: self._logger.show(step, values), _SHORT_SECONDS)

    def rewind(self, last_step: int) -> None:
        """Drop or set aside the steps after `last_step`, from which the run goes on."""
        self._call(lambda: self._logger.rewind(last_step), _LONG_SECONDS)

    def close(self) -> None:
        """Write pending records and close."""
        position.enter("profile")  # whose limit is larger than this one
        self._call(lambda: self._logger.close(), _LONG_SECONDS)

    def _call(self, function: Callable[[], Any], seconds: float) -> Any:
        if self._thread and self._thread.is_alive():
            raise OSError("an earlier call has not returned")
        found: list[Any] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:
                failed.append(error)

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        if failed and isinstance(failed[0], OSError | ConfigError):
            raise failed[0]
        if failed:
            raise OSError(f"{type(failed[0]).__name__}: {first_line(failed[0])}") from failed[0]
        if not found:
            raise OSError(f"no answer within {seconds:.0f} s")
        return found[0]


class WeightsAndBiases:
    """A wandb run with its files in `<run.dir>/wandb`.

    Every start and every rollback of a training run is a separate wandb run in a group named after
    the training run, so records from before it stay. The environment variable WANDB_MODE, which
    clusters without internet access set, overrides `log.wandb`. Raises `ConfigError` where a new
    run has no valid key.
    """

    def __init__(self, config: Config, last_step: int):
        import wandb

        self.name = f"{config.run.dir}/wandb"
        self._config, self._wandb = config, wandb
        try:
            self._run = self._started(last_step)
        except wandb.Error as error:
            if last_step or type(error).__name__ not in _KEY_ERRORS:
                raise
            raise ConfigError(
                f"log.wandb={self._mode!r} is refused by wandb ({first_line(error)}): run "
                f"`wandb login`, or use log.wandb=offline and `wandb sync` later."
            ) from error

    @property
    def _mode(self) -> str:
        return os.environ.get("WANDB_MODE") or self._config.log.wandb

    def _started(self, last_step: int) -> Any:
        config, wandb = self._config, self._wandb
        name = Path(config.run.dir).resolve().name
        return wandb.init(
            project=config.log.wandb_project,
            group=name,
            name=f"{name} from step {last_step}",
            dir=str(local_folder(config.run.dir)),
            mode=self._mode,
            config=to_builtins(config),
            settings=wandb.Settings(console="off"),  # wandb would disturb the progress line
        )

    def show(self, step: int, values: Shown) -> None:
        """Log one step's values as scalars and histograms."""
        shown = {
            name: self._wandb.Histogram(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        self._run.log(shown, step=step)

    def rewind(self, last_step: int) -> None:
        """Begin another wandb run, since wandb takes no earlier step."""
        self.close()
        self._run = self._started(last_step)

    def close(self) -> None:
        """Send pending records and finish the wandb run."""
        self._run.finish()


def open_loggers(config: Config, last_step: int, guard: WriteGuard | None = None) -> list[Logger]:
    """The configured loggers, which continue after `last_step`.

    A logger that cannot start is omitted and reported by `guard`; only a new run without a valid
    key for Weights & Biases is refused (`ConfigError`).
    """
    log, openers = config.log, dict[str, Callable[[], Logger]]()
    if log.tensorboard:
        openers[f"{config.run.dir}/tensorboard"] = lambda: _tensorboard(config, last_step)
    if log.prometheus_port:
        openers[f"log.prometheus_port={log.prometheus_port}"] = lambda: _prometheus(config)
    if log.wandb:
        openers[f"{config.run.dir}/wandb"] = lambda: WeightsAndBiases(config, last_step)
    guard, loggers = guard or WriteGuard(print), list[Logger]()
    for name, open_logger in openers.items():
        with guard.attempt(name, "this start logs nothing there"):
            loggers.append(Observer(name, open_logger))
    return loggers


def _tensorboard(config: Config, last_step: int) -> Logger:
    from jaxpipe.run.watch.tensorboard import TensorBoard

    return TensorBoard(config, last_step)


def _prometheus(config: Config) -> Logger:
    from jaxpipe.run.watch.prometheus import Prometheus  # needs the extra `prometheus`

    return Prometheus(config)
