"""Layer kinds that use every feature of the layer contract, for tests without a model.

`routed` returns a loss, counts, maxima and indices that must be stored; it reads its layer index
and a variable. `experts` has matrices sharded over ep, and sends tokens to the devices that own
their experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from toy import TOY, WIDTH, place_of

from jaxpipe.core.contract import Aux, LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.contract.parameter import EP, ParamSpec

CHOICES, EXPERTS = 3, 4


def routed(layers):
    """Return a layer that routes a token by its largest score, with auxiliary outputs."""

    def layer(params, x, context):
        score = x @ params["gate"] / place_of(context)
        share = jax.nn.softmax(score)
        biased = share + context.variables["bias"][context.index][None, None]
        choice = checkpoint_name(jnp.argmax(biased, axis=-1), "choice")
        weight = jnp.take_along_axis(share, choice[..., None], axis=-1)
        y = x + weight * jnp.tanh(x @ params["up"]) * params["gain"][None, None]
        taken = jax.nn.one_hot(choice, CHOICES, dtype=jnp.int32).sum((0, 1), dtype=jnp.int32)
        counts = jnp.zeros((layers, CHOICES), jnp.int32).at[context.index].set(taken)
        even = (context.rows["inputs"] % 2 == 0).astype(jnp.int32)
        side = Aux(
            losses={
                "share": (0.1 * jnp.sum(share * share) * (1 + context.index), choice.size),
                "even": (jnp.sum(share[..., 0] * even), even.sum()),
            },
            sums={"counts": counts, "share": share.sum((0, 1))},
            maxima={"score": jnp.abs(score).max() * (1 + context.index)},
        )
        return LayerOutput(y, None, side)

    leaves = {"gate": ParamSpec(matrix=(0, 1)), "up": ParamSpec(matrix=(0, 1)), "gain": ParamSpec()}
    return LayerKind(layer, leaves, keep=("choice",))


def experts(devices):
    """Return a layer whose experts are sharded evenly over `devices` neighbouring replicas."""

    def layer(params, x, context):
        own, inputs, w = 0, context.rows["inputs"], params["experts"]
        if devices > 1:
            own = lax.axis_index(EP) * w.shape[0]
            x_all = lax.all_gather(x, EP, axis=0, tiled=True)
            # XLA on CPU aborts (jaxlib 0.12.0) when two all-gathers that may run concurrently meet
            # under one key; it cannot combine these since their dtypes differ. Hence the barrier.
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
        side = Aux(sums={"tokens": jnp.int32(inputs.size // devices)})
        return LayerOutput(x + made * params["gain"][None, None], None, side)

    leaves = {"experts": ParamSpec(sharded=((EP, 0),), matrix=(1, 2)), "gain": ParamSpec()}
    return LayerKind(layer, leaves)


def mixed(order, devices=1):
    """Return the toy's embedding and head around mixed layers; `devices` share experts."""
    kinds = {"toy": TOY.kinds, "routed": routed(len(order)), "experts": experts(devices)}
    return StageFunctions(TOY.embed, kinds, TOY.head, TOY.count, order=tuple(order))


def layer_params(key, kind, dtype):
    """Return random parameters of one layer of a kind other than the toy's."""
    first, second, third = jax.random.split(key, 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, dtype) / WIDTH**0.5  # noqa: E731
    gain = 1 + 0.1 * jax.random.normal(third, (WIDTH,), dtype)
    if kind == "experts":
        return {"experts": normal(first, EXPERTS, WIDTH, WIDTH), "gain": gain}
    up = normal(second, WIDTH, WIDTH)
    return {"gate": 3 * normal(first, WIDTH, CHOICES), "up": up, "gain": gain}
