"""A trained model on the devices of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from msgspec import structs

from jaxpipe.checkpoint.compatibility import check_same_settings
from jaxpipe.checkpoint.hf.placing import place_parameters
from jaxpipe.config import Config, to_toml
from jaxpipe.core.executor import Pipeline
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.planning import Devices, resolve
from jaxpipe.runtime import processes
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any


@dataclass(eq=False)
class LoadedModel:
    """A trained model on a mesh.

    Attributes:
      saved: the model on disk; None: there is none.
      trainer: its functions, layout and mesh; nothing is trained.
      params: stage-stacked, in the compute dtype; may be replaced by others of the same shapes.
      variables: the model's state that is no parameter; None: it has none.
    """

    saved: SavedModel | None
    trainer: Trainer
    params: Tree
    variables: Tree

    @classmethod
    def load(cls, saved: SavedModel, config: Config) -> Self:
        """Put a model on the first devices of jax that the mesh needs, or on all (dp = -1).

        With several processes the mesh has all of their devices.

        Raises `ConfigError` where the devices do not fit the configuration, or the arrays on disk
        are not those of the model.
        """
        devices = jax.devices()
        if not processes.several() and 0 < config.parallel.devices <= len(devices):
            devices = devices[: config.parallel.devices]
        trainer = Trainer(resolve(config, Devices.present(devices), trains=False), devices)
        return cls(saved, trainer, _place(saved, trainer), _variables(saved, trainer))

    def pipeline(self, outputs: Callable[..., Tree]) -> Pipeline:
        """The pipeline of the model with these outputs (`StageFunctions.outputs`)."""
        functions = replace(self.trainer.model.functions, outputs=outputs)
        return replace(self.trainer.pipeline, functions=functions)


def initial_state(saved: SavedModel, trainer: Trainer) -> State:
    """The state of step 0 of a trainer with the parameters and variables of a saved model.

    Raises `ConfigError` where the trainer's `[model]` is another than the saved one, or its arrays
    are.
    """
    config = trainer.config
    settings = to_toml(structs.replace(config, model=saved.model))
    check_same_settings(saved.place, {"config": settings}, config, with_moments=False)
    shapes, layout = trainer.state_shapes.params, trainer.layout
    params = place_parameters(saved.read, shapes, layout, trainer.sharding, saved.place)
    state = trainer.fresh(params)
    variables = jax.device_put(_variables(saved, trainer), trainer.state_shardings.variables)
    return state._replace(variables=variables)


def _place(saved: SavedModel, trainer: Trainer) -> Tree:
    """The saved parameters on the mesh, in the compute dtype."""
    dtype = trainer.execution.compute_dtype
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), trainer.state_shapes.params
    )
    return place_parameters(saved.read, shapes, trainer.layout, trainer.sharding, saved.place)


def _variables(saved: SavedModel, trainer: Trainer) -> Tree:
    """The model's variables: the saved ones of their names, and initial values of all others.

    Those of blocks that predict further tokens come last, and are left out (`for_inference`).
    """
    first = trainer.model.functions.variables
    if not isinstance(first, dict):
        return first
    saved_of = {name: saved.variables.get(name, value) for name, value in first.items()}
    return jax.tree.map(
        lambda value, like: jnp.asarray(value)[tuple(map(slice, like.shape))], saved_of, first
    )
