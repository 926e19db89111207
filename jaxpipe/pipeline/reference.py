"""The oracle: the same functions on one device, one microbatch after the other, by `jax.grad`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.pipeline.stage import StageFunctions

Tree = Any


def losses_and_gradients_ref(
    functions: StageFunctions, shared: Tree, layers: list[Tree], batch: Tree
) -> tuple[jax.Array, Tree]:
    """Each microbatch's share of the loss `[M]`, and the gradients of their sum.

    `layers` are the parameters of all layers in order; gradients come as
    `{"shared": tree, "layers": [tree, ...]}`.
    """
    microbatches = [
        jax.tree.map(lambda a, m=m: a[m], batch) for m in range(jax.tree.leaves(batch)[0].shape[0])
    ]
    terms = sum(functions.count(microbatch) for microbatch in microbatches)

    def share(params: Tree, microbatch: Tree) -> jax.Array:
        x = functions.embed(params["shared"], microbatch)
        for layer in params["layers"]:
            x = functions.layer(layer, x, microbatch)
        loss = functions.head(params["shared"], x, microbatch)
        return jnp.where(terms > 0, loss / jnp.maximum(terms, 1), 0)

    share_and_gradients = jax.jit(jax.value_and_grad(share))
    params = {"shared": shared, "layers": layers}
    total = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for microbatch in microbatches:
        loss, gradients = share_and_gradients(params, microbatch)
        losses.append(loss)
        total = jax.tree.map(jnp.add, total, gradients)
    return jnp.stack(losses), total
