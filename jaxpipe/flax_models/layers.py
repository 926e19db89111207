"""The state of a `FlaxPipeline` by layer, which does not depend on schedule and mesh, and back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.core.mesh import StageLayout

Tree = Any
_STACKED, _BY_LAYER = {"embed_head", "layers"}, {"embed", "layers", "head"}


def by_layer(layout: StageLayout, state: Tree) -> Tree:
    """Return a state as nested dicts, with stage-stacked parts replaced by those of each layer.

    A part that is like the pipeline's parameters, such as gradients or a moment of an optimizer,
    becomes `{"embed": tree, "layers": [tree, ...], "head": tree}`.
    """

    def one(part: Tree) -> Tree:
        runs = [run for _, run in sorted(part["layers"].items())]
        return {**part["embed_head"], "layers": layout.unstack(runs)}

    if not isinstance(state, nnx.State):
        state = nnx.state(state)
    made = _replace(nnx.to_pure_dict(state), _STACKED, one)
    return made["params"] if made.keys() == {"params"} else made  # the pipeline's one attribute


def set_by_layer(layout: StageLayout, module: Any, tree: Tree) -> None:
    """Set the variables of a module or optimizer to what `by_layer` returned, sharded as they are.

    Raises `ValueError` where the tree is of another model or optimizer.
    """

    def one(part: Tree) -> Tree:
        if len(part["layers"]) != layout.layers:
            raise ValueError(
                f"the tree has {len(part['layers'])} layers but the pipeline {layout.layers}."
            )
        ends = {name: part[name] for name in ("embed", "head")}
        return {"embed_head": ends, "layers": dict(enumerate(layout.stack(part["layers"])))}

    state = nnx.state(module)
    want = nnx.to_pure_dict(state)
    given = _replace({"params": tree} if tree.keys() == _BY_LAYER else tree, _BY_LAYER, one)
    shapes = [jax.tree.map(jnp.shape, one) for one in (want, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the tree has other names or shapes than by_layer returns for this module: build the "
            "same model and optimizer, with any schedule and mesh."
        )
    nnx.replace_by_pure_dict(state, jax.tree.map(_placed_as, want, given))
    nnx.update(module, state)


def _placed_as(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the new array where the old one is; a count, say, is on no device in particular."""
    return jax.device_put(new, old.sharding) if old.committed else jnp.asarray(np.asarray(new))


def _replace(tree: Tree, keys: set[str], one: Callable[[Tree], Tree]) -> Tree:
    """Replace the dicts of these keys, at any depth."""
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == keys:
        return one(tree)
    return {key: _replace(part, keys, one) for key, part in tree.items()}
