"""Recording of expert routing: a batch together with its routes, in a file for replay."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.batches import DataSplit
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer


def record(trainer: Trainer, data: DataSplit, state: State, samples: int, path: Path) -> None:
    """Write the batch that starts at position `samples` of `data`, with its routes, to `path`.

    `Trainer.put` accepts it on any mesh of the same model, and steps on it use these routes.
    """
    with contextlib.closing(data.batches(samples, **trainer.sharder.sizes)) as batches:
        scores = BatchScores(trainer)
        write(path, scores.record_routes(state.params, next(batches), state.variables))


def write(path: Path, batch: dict[str, Any]) -> None:
    """Write a batch as an `.npz` file; `ConfigError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **batch)
    except OSError as error:
        raise ConfigError(
            f"--record-routes {path} cannot be written ({error.strerror}): give another path."
        ) from error
