"""Parameters by layer and name put on a mesh, one parameter of a run of layers at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpipe.config import ConfigError
from jaxpipe.core.mesh import ParamSharding, Sharding, StageLayout

Tree = Any
ParamPath = tuple[str, ...]  # ("layers", "17", "attn", "wq") or ("embed_head", "embed")
Read = Callable[[Sequence[ParamPath]], list[np.ndarray]]


def place_parameters(
    read: Read, shapes: Tree, layout: StageLayout, sharding: Sharding, place: Any
) -> Tree:
    """Read parameters one by one, each of all layers of a run, and shard each at once.

    Args:
      read: reads the arrays at paths, in their order.
      shapes: shapes and dtypes of the parameters on the mesh, with padding: a stage-stacked tree,
        or part of one.
      layout: which pipeline rank has which layer.
      sharding: how parameters are stored.
      place: where they are from, for the message.

    Raises `ConfigError` where an array has another shape.
    """
    targets = jax.tree.map(
        _Target, shapes, sharding.param_shardings(shapes), sharding.named_shardings(shapes)
    )

    def run(number: int, tree: Tree) -> Tree:
        layers = layout.layers_of(number).items()
        origins = {index: ("layers", str(layer)) for index, layer in layers}
        return _read_tree(read, tree, origins, place)

    return {
        "embed_head": _read_tree(read, targets["embed_head"], {(): ("embed_head",)}, place),
        "layers": tuple(run(number, tree) for number, tree in enumerate(targets["layers"])),
    }


class _Target(NamedTuple):
    """Shape, with padding, and sharding of a parameter on the mesh."""

    like: jax.ShapeDtypeStruct
    stored: ParamSharding
    sharding: NamedSharding


def _read_tree(
    read: Read, targets: Tree, origins: Mapping[tuple[int, ...], ParamPath], place: Any
) -> Tree:
    """The arrays of a tree of `_Target`s, zero where nothing is read.

    `origins` has the paths of the trees to read, by their index in the arrays.
    """
    leaves, structure = jax.tree.flatten_with_path(
        targets, is_leaf=lambda node: isinstance(node, _Target)
    )

    def put(name: ParamPath, target: _Target) -> jax.Array:
        full = np.zeros(target.like.shape, target.like.dtype)
        # One parameter at a time, so that the host does not hold all of a model.
        arrays = read([(*origin, *name) for origin in origins.values()])
        for index, array in zip(origins, arrays, strict=True):
            expected = target.stored.unpadded_shape(full.shape)[len(index) :]
            if array.shape != expected:
                raise ConfigError(
                    f"{place} is of another model: {'/'.join(name)} has shape {array.shape} there, "
                    f"and its configuration describes {expected}."
                )
            place_in_full: tuple[int | slice, ...] = (*index, *map(slice, array.shape))
            full[place_in_full] = array
        # Processes may own some devices each; all of them read the arrays.
        return jax.make_array_from_callback(full.shape, target.sharding, full.__getitem__)

    return jax.tree.unflatten(
        structure, [put(tuple(part.key for part in path), leaf) for path, leaf in leaves]
    )
