"""Which experts tokens went to: a batch with its routes, in the form in which they are replayed."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.sources import Split
from jaxpipe.model.moe.balance import ROUTES
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer


def record(trainer: Trainer, data: Split, state: State, samples: int, path: Path) -> None:
    """Write the batch that begins after so many samples, with its routes, and nothing else."""
    with contextlib.closing(data.batches(samples, **trainer.feed.sizes)) as batches:
        write(path, recorded(trainer, state, next(batches)))


def recorded(trainer: Trainer, state: State, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """A host batch with `routes [M, B, L, sparse layers, experts_per_token]`, by a forward pass.

    `Trainer.put` takes it as it is, on any mesh of the same model; steps then go these ways.
    """
    return batch | {ROUTES: np.asarray(routes_of(trainer)(state, trainer.put(batch)))}


def routes_of(trainer: Trainer) -> Any:
    """Compiled `(state, batch) -> routes`, by the forward-only pass."""
    functions = replace(trainer.model, recorded=True).functions
    pipeline = replace(trainer.pipeline, functions=functions)

    def routes(state: State, batch: Any) -> jax.Array:
        return pipeline.forward(state.params, batch, state.variables).side.rows[ROUTES]

    return jax.jit(routes, in_shardings=(trainer.state_shardings, trainer.feed.sharding))


def write(path: Path, batch: dict[str, np.ndarray]) -> None:
    """Write a batch as an `.npz` file, an array a leaf; `ConfigError` where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **batch)
    except OSError as error:
        raise ConfigError(
            f"--record-routes {path} cannot be written ({error.strerror}): give another path."
        ) from error
