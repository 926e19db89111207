"""Groups of parameters that an optimizer treats alike, and the weight decay of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from jaxpipe.config import OptimizerConfig
from jaxpipe.core.mesh import ParamSharding

Tree = Any
Stores = Callable[[Tree], Tree]  # a stage-stacked tree to the `ParamSharding` of every leaf


def weight_decay(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """A transformation that adds each group's weight decay times the parameter to the update."""
    rates = {
        "matrix": config.weight_decay,
        "embed_head": config.weight_decay * config.decay_of_embed_head,
        "vector": config.weight_decay * config.decay_of_vectors,
    }

    def add(updates: Tree, params: Tree) -> Tree:
        return jax.tree.map(
            lambda update, leaf, group: update + rates[group] * leaf if rates[group] else update,
            updates, params, groups(params, stored),
        )  # fmt: skip

    return optax.stateless(add)


def groups(params: Tree, stored: Stores) -> Tree:
    """The group of every parameter: `matrix` (in layers), `embed_head` or `vector`."""

    def group(matrices: str, how: ParamSharding) -> str:
        return "vector" if how.param.matrix is None else matrices

    names = {"embed_head": "embed_head", "layers": "matrix"}
    return {
        part: jax.tree.map(partial(group, names[part]), leaves)
        for part, leaves in stored(params).items()
    }
