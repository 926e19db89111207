"""A trained model on the devices of a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpipe.config import Config, ConfigError
from jaxpipe.inference.saved_model import ParamPath, SavedModel
from jaxpipe.parallel import ParamSharding
from jaxpipe.pipeline import Pipeline
from jaxpipe.training.trainer import Trainer

Tree = Any


@dataclass(frozen=True)
class LoadedModel:
    """A trained model on a mesh.

    Attributes:
      saved: the model on disk.
      trainer: its functions, layout and mesh; nothing is trained.
      params: stage-stacked, in the compute dtype.
      variables: the model's state that is no parameter; None: it has none.
    """

    saved: SavedModel
    trainer: Trainer
    params: Tree
    variables: Tree

    @classmethod
    def load(cls, saved: SavedModel, config: Config) -> Self:
        """Put a model on the first devices of jax that the mesh needs, or on all (dp = -1).

        Raises `ConfigError` where the devices do not fit the configuration, or the arrays on disk
        are not those of the model.
        """
        devices = jax.devices()
        if 0 < config.parallel.devices <= len(devices):
            devices = devices[: config.parallel.devices]
        trainer = Trainer.resolve(config, devices)
        return cls(saved, trainer, _place(saved, trainer), _variables(saved, trainer))

    def pipeline(self, outputs: Callable[..., Tree]) -> Pipeline:
        """The pipeline of the model with these outputs (`StageFunctions.outputs`)."""
        functions = replace(self.trainer.model.functions, outputs=outputs)
        return replace(self.trainer.pipeline, functions=functions)


def _place(saved: SavedModel, trainer: Trainer) -> Tree:
    """Read the parameters layer slot by layer slot, and shard each as soon as it is read."""
    shapes, sharding = trainer.state_shapes.params, trainer.sharding
    targets = jax.tree.map(
        _Target, shapes, sharding.param_shardings(shapes), sharding.named_shardings(shapes)
    )
    dtype = trainer.execution.compute_dtype

    def slot(number: int, tree: Tree) -> Tree:
        layers = enumerate(row[number] for row in trainer.layout.layer_table)
        origins = {(rank,): ("layers", str(i)) for rank, i in layers if i is not None}
        return _read_tree(saved, tree, origins, dtype)

    return {
        "embed_head": _read_tree(saved, targets["embed_head"], {(): ("embed_head",)}, dtype),
        "layers": tuple(slot(number, tree) for number, tree in enumerate(targets["layers"])),
    }


class _Target(NamedTuple):
    """Shape, with padding, and sharding of a parameter on the mesh."""

    like: jax.ShapeDtypeStruct
    stored: ParamSharding
    sharding: NamedSharding


def _read_tree(
    saved: SavedModel, targets: Tree, origins: Mapping[tuple[int, ...], ParamPath], dtype: Any
) -> Tree:
    """The arrays of a tree of `_Target`s, zero where nothing is on disk.

    `origins` has the paths on disk of the trees to read, by their index in the arrays.
    """
    leaves, structure = jax.tree.flatten_with_path(
        targets, is_leaf=lambda node: isinstance(node, _Target)
    )
    names = [tuple(part.key for part in path) for path, _ in leaves]
    read = iter(saved.read([(*origin, *name) for name in names for origin in origins.values()]))

    def put(name: ParamPath, target: _Target) -> jax.Array:
        full = np.zeros(target.like.shape, dtype)
        for index in origins:
            array = next(read)
            expected = target.stored.unpadded_shape(full.shape)[len(index) :]
            if array.shape != expected:
                raise ConfigError(
                    f"{saved.place} is of another model: {'/'.join(name)} has shape "
                    f"{array.shape} there, and its configuration describes {expected}."
                )
            full[(*index, *map(slice, array.shape))] = array
        return jax.device_put(full, target.sharding)

    return jax.tree.unflatten(
        structure, [put(name, leaf) for name, (_, leaf) in zip(names, leaves)]
    )


def _variables(saved: SavedModel, trainer: Trainer) -> Tree:
    """The model's variables: the saved ones of their names, and initial values of all others."""
    first = trainer.model.functions.variables
    if not isinstance(first, dict):
        return first
    kept = {name: value for name, value in saved.variables.items() if name in first}
    return jax.tree.map(jnp.asarray, {**first, **kept})
