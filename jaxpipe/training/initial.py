"""Initial parameters: the same numbers on every mesh, drawn by every device for its own shards."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.model.family import Model
from jaxpipe.parallel import PP, REPLICA_AXES, TP, ParamSharding, StageLayout

Tree = Any


def full_parameters(model: Model, layout: StageLayout, seed: int) -> Tree:
    """The full stage-stacked parameters on one device, without padding."""
    key = jax.random.key(seed)
    layers = [model.init_layer(key, i, kind) for i, kind in enumerate(layout.kinds)]
    return {"embed_head": model.init_embed_head(key), "layers": layout.stack(layers)}


def parameters_on_rank(model: Model, layout: StageLayout, seed: int, stored: Tree) -> Tree:
    """This device's shards of the parameters, drawn in full; for use within `jax.shard_map`.

    `stored` is the tree of `ParamSharding` of the stage-stacked parameters.
    """
    key, rank = jax.random.key(seed), jax.lax.axis_index(PP)

    def own_shard(how: ParamSharding, leaf: jax.Array) -> jax.Array:
        return how.without_stage_axis.shard(leaf, {TP, *REPLICA_AXES})

    def slot(layers: tuple[int | None, ...], kind: str, leaves: Tree) -> Tree:
        index = jnp.asarray([-1 if layer is None else layer for layer in layers])[rank]
        layer = model.init_layer(key, index, kind)
        owned = jax.tree.map(lambda leaf: jnp.where(index >= 0, leaf, 0), layer)
        return jax.tree.map(lambda leaf, how: own_shard(how, leaf)[None], owned, leaves)

    return {
        "embed_head": jax.tree.map(
            lambda leaf, s: s.shard(leaf, {TP, PP, *REPLICA_AXES}),
            model.init_embed_head(key),
            stored["embed_head"],
        ),
        "layers": tuple(map(slot, zip(*layout.layer_table), layout.slot_kinds, stored["layers"])),
    }
