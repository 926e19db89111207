"""Where the numbers of a run are shown beside its own log: TensorBoard, Weights & Biases."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import histogram, scalar

from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.runtime.directory import AppendedFile, WriteGuard

Shown = Mapping[str, float | np.ndarray]  # a scalar, or the finite numbers of a histogram, by name
_BINS = 64  # of a histogram


class Board(Protocol):
    """A place that shows numbers by step. Its methods raise `OSError` where they cannot."""

    name: str  # in messages

    def show(self, step: int, values: Shown) -> None:
        """Take one step's numbers."""

    def close(self) -> None:
        """Write what is still to be written."""


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`; those of steps after `last_step` count no more.

    Events are records of the TFRecord format. tensorboardX's own writer would hand them to a
    thread, and wait for ever for it once that has died of a full disk.
    """

    def __init__(self, config: Config, last_step: int):
        directory = Path(config.run.dir) / "tensorboard"
        self.name = str(directory)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._before = [  # of the first step: what a reader of the file wants to know first
            Event(file_version="brain.Event:2"),
            Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)),
        ]

    def show(self, step: int, values: Shown) -> None:
        """Write them as scalars and histograms."""
        events, self._before = self._before, []
        for name, value in values.items():
            several = isinstance(value, np.ndarray)
            summary = histogram(name, value, _BINS) if several else scalar(name, value)
            events.append(Event(step=step, summary=summary))
        self._file.append(b"".join(map(_record, events)))

    def close(self) -> None:
        """Write what is still to be written."""
        self._file.close()


def _record(event: Event) -> bytes:
    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
    return length + next(checksums) + content + next(checksums)


class WeightsAndBiases:
    """A run of wandb, its files in `<run.dir>/wandb`.

    Every start of a run is one of wandb's, all in a group that has the name of the run: what was
    logged before a resume stays there. Raises `ConfigError` where wandb refuses.
    """

    def __init__(self, config: Config, last_step: int):
        import wandb

        self.name = f"{config.run.dir}/wandb"
        self._histogram, self._error = wandb.Histogram, wandb.Error
        name = Path(config.run.dir).resolve().name
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                group=name,
                name=f"{name} from step {last_step}",
                dir=config.run.dir,
                mode=config.log.wandb,
                config=msgspec.to_builtins(config),
                settings=wandb.Settings(console="off"),  # the terminal is the progress line's
            )
        except wandb.Error as error:
            raise ConfigError(
                f"log.wandb={config.log.wandb!r} is refused by wandb ({first_line(error)}): run "
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
    wanted = {TensorBoard: config.log.tensorboard, WeightsAndBiases: config.log.wandb}
    found: list[Board] = []
    guard = guard or WriteGuard(print)
    for board, asked in wanted.items():
        if asked:
            with guard.attempt(f"{config.run.dir}: {board.__name__}"):
                found.append(board(config, last_step))
    return found
