"""Initial parameters: the same numbers on every mesh, drawn by every device for its own shards."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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

    table = [[-1 if layer is None else layer for layer in row] for row in layout.layer_table]
    here = jnp.asarray(table)[rank]

    def layer(index: jax.Array, kind: str, stored: Tree) -> Tree:
        def own_shard(how: ParamSharding, leaf: jax.Array) -> jax.Array:
            return how.shard(jnp.where(index >= 0, leaf, 0), {TP, *REPLICA_AXES})

        return jax.tree.map(own_shard, stored, model.init_layer(key, index, kind))

    def run(slots: range, stored: Tree) -> Tree:
        kind = layout.slot_kinds[slots.start]
        how = jax.tree.map(lambda leaf: leaf.without_leading_axis, stored)
        if len(slots) == 1:
            own = layer(here[slots.start], kind, how)
        else:
            alone = jax.tree.map(lambda leaf: leaf.without_leading_axis, how)
            own = lax.map(lambda index: layer(index, kind, alone), here[slots.start : slots.stop])
        return jax.tree.map(lambda leaf: leaf[None], own)

    return {
        "embed_head": jax.tree.map(
            lambda leaf, s: s.shard(leaf, {TP, PP, *REPLICA_AXES}),
            model.init_embed_head(key),
            stored["embed_head"],
        ),
        "layers": tuple(map(run, layout.runs, stored["layers"])),
    }
