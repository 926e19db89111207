"""Recording of expert routing: a batch together with its routes, in the form for replay."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.batches import DataSplit
from jaxpipe.model.moe.balance import ROUTES
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer


def record(trainer: Trainer, data: DataSplit, state: State, samples: int, path: Path) -> None:
    """Write the batch that starts at position `samples` of `data`, with its routes, to `path`."""
    with contextlib.closing(data.batches(samples, **trainer.sharder.sizes)) as batches:
        write(path, recorded(trainer, state, next(batches)))


def recorded(trainer: Trainer, state: State, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """The host batch with `routes [M, B, L, sparse layers, experts_per_token]` added.

    The routes come from a forward pass. `Trainer.put` accepts the result on any mesh of the same
    model, and steps on it then use these routes.
    """
    return batch | {ROUTES: np.asarray(routes_of(trainer)(state, trainer.put(batch)))}


def routes_of(trainer: Trainer) -> Any:
    """Compiled `(state, batch) -> routes`, which runs the forward-only pass."""
    functions = replace(trainer.model, recorded=True).functions
    pipeline = replace(trainer.pipeline, functions=functions)

    def routes(state: State, batch: Any) -> jax.Array:
        return pipeline.forward(state.params, batch, state.variables).aux.per_example[ROUTES]

    return jax.jit(routes, in_shardings=(trainer.state_shardings, trainer.sharder.sharding))


def write(path: Path, batch: dict[str, np.ndarray]) -> None:
    """Write a batch as an `.npz` file; `ConfigError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **batch)
    except OSError as error:
        raise ConfigError(
            f"--record-routes {path} cannot be written ({error.strerror}): give another path."
        ) from error
