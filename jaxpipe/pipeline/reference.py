"""The oracle: the same functions on one device, one sequence after the other, by `jax.grad`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.pipeline.stage import StageFunctions

Tree = Any


def losses_and_gradients_ref(
    functions: StageFunctions, shared: Tree, layers: list[Tree], batch: Tree, slices: int = 1
) -> tuple[jax.Array, Tree]:
    """Each microbatch's share of the loss `[M]`, and the gradients of their sum.

    So many `slices` in a row are microbatches of the same sequences. `layers` are the parameters of
    all layers in order; gradients come as `{"shared": tree, "layers": [tree, ...]}`.
    """
    microbatches = [
        jax.tree.map(lambda a, m=m: a[m], batch) for m in range(jax.tree.leaves(batch)[0].shape[0])
    ]
    terms = sum(functions.count(microbatch) for microbatch in microbatches)

    def shares(params: Tree, slices: list[Tree]) -> tuple[jax.Array, list[jax.Array]]:
        losses, states = [], [None] * len(params["layers"])
        for microbatch in slices:
            x = functions.embed(params["shared"], microbatch)
            for index, layer in enumerate(params["layers"]):
                if functions.state is None:
                    x = functions.layer(layer, x, microbatch)
                    continue
                state = states[index]
                state = functions.state(x, microbatch) if state is None else state
                x, states[index] = functions.layer(layer, (x, state), microbatch)
            loss = functions.head(params["shared"], x, microbatch)
            losses.append(jnp.where(terms > 0, loss / jnp.maximum(terms, 1), 0))
        return sum(losses), losses

    shares_and_gradients = jax.jit(jax.value_and_grad(shares, has_aux=True))
    params = {"shared": shared, "layers": layers}
    total = jax.tree.map(jnp.zeros_like, params)
    every = []
    for first in range(0, len(microbatches), slices):
        (_, losses), gradients = shares_and_gradients(params, microbatches[first : first + slices])
        every += losses
        total = jax.tree.map(jnp.add, total, gradients)
    return jnp.stack(every), total
