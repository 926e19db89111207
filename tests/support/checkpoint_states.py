"""Small states with their keying, for tests of checkpoints."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.core.mesh import Sharding, StageLayout, make_mesh


def layer(index, width=6):
    return {"attn": {"wq": index + jnp.arange(width * 4.0).reshape(width, 4)}, "norm": jnp.ones(4)}


def make_state(counts, dp=1, width=6):
    """Return `(state, keying)`: stage-stacked parameters and Adam moments on a mesh."""
    pp, layout = len(counts), StageLayout(tuple(counts))
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    params = {
        "embed_head": {"embed": jnp.arange(12.0 * 8).reshape(12, 8), "norm": jnp.arange(5.0)},
        "layers": layout.stack([layer(i, width) for i in range(layout.layers)]),
    }
    sharding = Sharding(mesh)
    put = lambda tree: jax.device_put(tree, sharding.named_shardings(tree))  # noqa: E731
    moments = optax.adamw(1e-3).init(params)
    moments = optax.tree.map_params(optax.adamw(1e-3), lambda leaf: leaf + 0.5, moments)
    # Layer slots without a layer hold zeros in a real state; restore leaves zeros there.
    blank = layout.stack(
        [jax.tree.map(jnp.ones_like, layer(i, width)) for i in range(layout.layers)]
    )
    blank = {"embed_head": jax.tree.map(jnp.ones_like, params["embed_head"]), "layers": blank}
    is_stage = lambda node: isinstance(node, dict) and "embed_head" in node  # noqa: E731
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = jax.tree.map(
        lambda node: (
            put(jax.tree.map(jnp.multiply, node, blank))
            if is_stage(node)
            else jax.device_put(node, everywhere)
        ),
        moments,
        is_leaf=is_stage,
    )
    state = {"params": put(params), "optimizer": moments}
    return state, StateKeying(layout, sharding)


def open_at(directory, keying, **options):
    return CheckpointStore(
        directory, **({"keep": 3, "asynchronous": True} | options), keying=keying
    )
