"""Where the numbers of a run are shown beside its own log: TensorBoard, Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxpipe.config import Config, ConfigError, first_line

Shown = Mapping[str, float | np.ndarray]  # a scalar, or the finite numbers of a histogram, by name


class Board(Protocol):
    """A place that shows numbers by step."""

    def show(self, step: int, values: Shown) -> None:
        """Take one step's numbers."""

    def close(self) -> None:
        """Write what is still to be written."""


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`; those of steps after `last_step` count no more."""

    def __init__(self, config: Config, last_step: int):
        from tensorboardX import SummaryWriter

        directory = Path(config.run.dir) / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1)

    def show(self, step: int, values: Shown) -> None:
        """Write them as scalars and histograms."""
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                self._writer.add_histogram(name, value, step)
            elif isinstance(value, int):
                self._writer.file_writer.add_summary(_counter(name, value), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still to be written."""
        self._writer.close()


def _counter(name: str, value: int) -> Any:
    """A count as a scalar in float64, exact up to 2^53; other scalars are float32."""
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto

    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    number = TensorProto(dtype="DT_DOUBLE", double_val=[value])
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=name, tensor=number, metadata=metadata)])


class WeightsAndBiases:
    """A run of wandb, its files in `<run.dir>/wandb`.

    Every start of a run is one of wandb's, all in a group that has the name of the run: what was
    logged before a resume stays there. Raises `ConfigError` where wandb refuses.
    """

    def __init__(self, config: Config, last_step: int):
        import wandb

        self._histogram = wandb.Histogram
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
        self._run.log(shown, step=step)

    def close(self) -> None:
        """Send what is still to be sent, and end the run."""
        self._run.finish()


def boards(config: Config, last_step: int) -> list[Board]:
    """Those that the configuration asks for, to go on after `last_step`."""
    wanted = {TensorBoard: config.log.tensorboard, WeightsAndBiases: config.log.wandb}
    return [board(config, last_step) for board, asked in wanted.items() if asked]
