"""Which experts tokens went to: a batch with its routes, in the form in which they are replayed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.config import Config, ConfigError
from jaxpipe.model.moe.balance import ROUTES
from jaxpipe.training.trainer import State, Trainer


def check_recording(config: Config, processes: int = 1) -> None:
    """Raise `ConfigError` where a run of so many processes cannot record routes."""
    parallel = config.parallel
    if not config.model.routed_experts:
        raise ConfigError("--record-routes: model.n_experts=0, no token is routed; leave it out.")
    if processes > 1:
        raise ConfigError(
            f"--record-routes with {processes} processes: one writes the whole batch; use one."
        )
    if parallel.slices > 1 or parallel.sdp > 1:
        raise ConfigError(
            f"--record-routes with parallel.slices={parallel.slices} and parallel.sdp="
            f"{parallel.sdp}: routes are recorded of whole sequences, and replayed on any mesh; "
            f"set both to 1."
        )


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
