"""Initial parameters: the same numbers on every mesh, drawn by every device for its own shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.core.mesh import PP, REPLICA_AXES, TP, ParamSharding, Sharding, StageLayout
from jaxpipe.model.family import Model
from jaxpipe.runtime.programs.program_store import ProgramStore

Tree = Any


def full_parameters(model: Model, layout: StageLayout, seed: int) -> Tree:
    """The full stage-stacked parameters on one device, without padding."""
    key = jax.random.key(seed)
    kinds = model.functions.layer_kinds(layout.layers)
    layers = [model.init_layer(key, i, kind) for i, kind in enumerate(kinds)]
    return {"embed_head": model.init_embed_head(key), "layers": layout.stack(layers)}


def sharded_parameters(
    model: Model, layout: StageLayout, seed: int, sharding: Sharding, like: Tree,
    store: ProgramStore,
) -> Tree:  # fmt: skip
    """The stage-stacked parameters on the mesh, of the shapes and dtypes of `like`.

    Every device draws a parameter in full before it takes its shard. XLA needs seconds to compile
    the draws of a few layers, so there is one program for all runs of the same kind and length, and
    `store` keeps them.
    """
    stored = sharding.param_shardings(like)
    table = [[-1 if layer is None else layer for layer in row] for row in layout.layer_table]
    programs: dict[tuple[str, int], Callable[[np.ndarray], Tree]] = {}

    def compiled(
        name: str, draw: Callable[..., Tree], stored: Tree, *args: np.ndarray
    ) -> Callable[..., Tree]:
        specs = jax.tree.map(lambda how: how.partition_spec, stored)
        mapped = jax.shard_map(
            draw, mesh=sharding.mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
        )
        return store.compiled(f"init-{name}", jax.jit(mapped), *args)

    def embed_head() -> Tree:
        return jax.tree.map(
            lambda how, leaf, like: how.shard(leaf, {TP, PP, *REPLICA_AXES}).astype(like.dtype),
            stored["embed_head"], model.init_embed_head(jax.random.key(seed)), like["embed_head"],
        )  # fmt: skip

    def run(slots: range, stored: Tree, like: Tree) -> Tree:
        kind = layout.slot_kinds[slots.start]

        def layer(index: jax.Array) -> Tree:
            def own_shard(how: ParamSharding, leaf: jax.Array, like: Any) -> jax.Array:
                how = how.without_leading_axis
                how = how.without_leading_axis if len(slots) > 1 else how
                leaf = how.shard(jnp.where(index >= 0, leaf, 0), {TP, *REPLICA_AXES})
                return leaf.astype(like.dtype)

            drawn = model.init_layer(jax.random.key(seed), index, kind)
            return jax.tree.map(own_shard, stored, drawn, like)

        def on_rank(layers: jax.Array) -> Tree:
            here = layers[lax.axis_index(PP)]
            own = lax.map(layer, here) if len(slots) > 1 else layer(here[0])
            return jax.tree.map(lambda leaf: leaf[None], own)

        layers = np.asarray(table, np.int32)[:, slots.start : slots.stop]
        if (which := (kind, len(slots))) not in programs:
            programs[which] = compiled(f"layers-{slots.start}", on_rank, stored, layers)
        return programs[which](layers)

    return {
        "embed_head": compiled("embed-head", embed_head, stored["embed_head"])(),
        "layers": tuple(map(run, layout.runs, stored["layers"], like["layers"])),
    }
