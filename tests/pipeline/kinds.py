"""Kinds of layers with all that the contract allows, for tests, without a model around them.

`routed` makes a loss, counts, maxima, and indices that must be kept; it reads its index and a
variable. `experts` has matrices cut over ep, and sends tokens to the devices that have theirs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from toy import TOY, WIDTH

from jaxpipe.contract import LayerKind, LayerOutput, Side, StageFunctions
from jaxpipe.partition.leaf import EP, Leaf

CHOICES, EXPERTS = 3, 4


def routed(layers):
    """A layer that takes one of a few ways by the largest score, and tells what it did."""

    def layer(params, x, context):
        score = x @ params["gate"] / (1 + context.rows["positions"][..., None])
        share = jax.nn.softmax(score)
        biased = share + context.variables["bias"][context.index][None, None]
        choice = checkpoint_name(jnp.argmax(biased, axis=-1), "choice")
        weight = jnp.take_along_axis(share, choice[..., None], axis=-1)
        y = x + weight * jnp.tanh(x @ params["up"]) * params["gain"][None, None]
        taken = jax.nn.one_hot(choice, CHOICES, dtype=jnp.int32).sum((0, 1), dtype=jnp.int32)
        counts = jnp.zeros((layers, CHOICES), jnp.int32).at[context.index].set(taken)
        side = Side(
            loss=0.1 * jnp.sum(share * share) * (1 + context.index),
            sums={"counts": counts, "share": share.sum((0, 1))},
            maxima={"score": jnp.abs(score).max() * (1 + context.index)},
        )
        return LayerOutput(y, None, side)

    leaves = {"gate": Leaf(matrix=(0, 1)), "up": Leaf(matrix=(0, 1)), "gain": Leaf()}
    return LayerKind(layer, leaves, keep=("choice",))


def experts(devices):
    """A layer whose experts are on so many neighbouring replicas, each with an equal part."""

    def layer(params, x, context):
        own, inputs, w = 0, context.rows["inputs"], params["experts"]
        if devices > 1:
            own = lax.axis_index(EP) * w.shape[0]
            x_all = lax.all_gather(x, EP, axis=0, tiled=True)
            # Two gathers that are free to run at once, and that XLA on CPU cannot combine since
            # their dtypes differ, meet under one key there, and it aborts (jaxlib 0.12.0).
            x_all, inputs = lax.optimization_barrier((x_all, inputs))
            inputs = lax.all_gather(inputs, EP, axis=0, tiled=True)
        else:
            x_all = x
        made = jnp.zeros_like(x_all)
        for e in range(w.shape[0]):
            mine = (inputs % EXPERTS == own + e)[..., None]
            made += jnp.where(mine, jnp.tanh(x_all @ w[e]), 0)
        if devices > 1:
            made = lax.psum_scatter(made, EP, scatter_dimension=0, tiled=True)
        side = Side(sums={"tokens": jnp.int32(inputs.size // devices)})
        return LayerOutput(x + made * params["gain"][None, None], None, side)

    leaves = {"experts": Leaf(cuts=((EP, 0),), matrix=(1, 2)), "gain": Leaf()}
    return LayerKind(layer, leaves)


def mixed(order, devices=1):
    """The toy's ends around layers of several kinds, experts on so many devices."""
    kinds = {"toy": TOY.kinds, "routed": routed(len(order)), "experts": experts(devices)}
    return StageFunctions(TOY.embed, kinds, TOY.head, TOY.count, order=tuple(order))


def layer_params(key, kind, dtype):
    """Random parameters of one layer of a kind other than the toy's."""
    first, second, third = jax.random.split(key, 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, dtype) / WIDTH**0.5  # noqa: E731
    gain = 1 + 0.1 * jax.random.normal(third, (WIDTH,), dtype)
    if kind == "experts":
        return {"experts": normal(first, EXPERTS, WIDTH, WIDTH), "gain": gain}
    up = normal(second, WIDTH, WIDTH)
    return {"gate": 3 * normal(first, WIDTH, CHOICES), "up": up, "gain": gain}
