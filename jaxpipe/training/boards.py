"""Where the numbers of a run are shown beside its own log: TensorBoard, Weights & Biases."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.runtime.directory import WriteGuard

Shown = Mapping[str, float | np.ndarray]  # a scalar, or the finite numbers of a histogram, by name


class Board(Protocol):
    """A place that shows numbers by step. Its methods raise `OSError` where they cannot."""

    name: str  # in messages

    def show(self, step: int, values: Shown) -> None:
        """Take one step's numbers."""

    def close(self) -> None:
        """Write what is still to be written."""


class WeightsAndBiases:
    """A run of wandb, its files in `<run.dir>/wandb`.

    Every start of a run is one of wandb's, all in a group that has the name of the run: what was
    logged before a resume stays there. The environment's WANDB_MODE, which clusters without a way
    to the internet set, goes before `log.wandb`. Raises `ConfigError` where wandb refuses.
    """

    def __init__(self, config: Config, last_step: int):
        import wandb

        self.name = f"{config.run.dir}/wandb"
        self._histogram, self._error = wandb.Histogram, wandb.Error
        name = Path(config.run.dir).resolve().name
        mode = os.environ.get("WANDB_MODE") or config.log.wandb
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                group=name,
                name=f"{name} from step {last_step}",
                dir=config.run.dir,
                mode=mode,
                config=msgspec.to_builtins(config),
                settings=wandb.Settings(console="off"),  # the terminal is the progress line's
            )
        except wandb.Error as error:
            raise ConfigError(
                f"log.wandb={mode!r} is refused by wandb ({first_line(error)}): run "
                f"`wandb login`, or use log.wandb=offline and `wandb sync` later."
            ) from error

    def show(self, step: int, values: Shown) -> None:
        """Send them as numbers and histograms."""
        shown = {
            name: self._histogram(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        with self._its_errors():
            self._run.log(shown, step=step)

    def close(self) -> None:
        """Send what is still to be sent, and end the run."""
        with self._its_errors():
            self._run.finish()

    @contextlib.contextmanager
    def _its_errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OSError(first_line(error)) from error


def boards(config: Config, last_step: int, guard: WriteGuard | None = None) -> list[Board]:
    """Those that the configuration asks for, to go on after `last_step`.

    One whose files cannot be written is left out and reported by `guard`.
    """
    guard, found = guard or WriteGuard(print), list[Board]()
    if config.log.tensorboard:
        from jaxpipe.training.tensorboard import TensorBoard  # a trainer needs no event files

        found.append(TensorBoard(config, last_step))
    if config.log.wandb:
        with guard.attempt(f"{config.run.dir}/wandb"):
            found.append(WeightsAndBiases(config, last_step))
    return found
