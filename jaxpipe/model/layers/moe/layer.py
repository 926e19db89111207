"""A mixture of experts in the place of an MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.core.contract import Aux, Context
from jaxpipe.core.contract.experts import AllExperts
from jaxpipe.model.layers.moe.balance import LOADS, ROUTES, Balance, real_tokens
from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.moe.dispatch import SLOTS
from jaxpipe.model.layers.moe.experts import (
    CapacityDispatch,
    Dispatch,
    DroplessDispatch,
    Experts,
)
from jaxpipe.model.layers.moe.hosts import HostDispatch
from jaxpipe.model.layers.moe.products import Product
from jaxpipe.model.layers.moe.router import CHOICE, Router
from jaxpipe.model.layers.parts import Dot, Init
from jaxpipe.model.options import LayerParts

KEEP = (CHOICE, LOADS, SLOTS)  # checkpoint names that F stores under every `train.remat`


class MixtureOfExperts(nnx.Module):
    """Routed experts and `shared`, an MLP that takes every token; None: no shared experts.

    Devices along tp share the width of the routed experts, and all route the same tokens; or they
    have different experts (`AllExperts.over_tp`), and each routes its own tokens.
    """

    def __init__(
        self, config: MixtureConfig, parts: LayerParts, init: Init, shared: nnx.Module | None
    ):
        self.router = Router(config, parts, init)
        sharing, ops = parts.sharing, parts.ops
        self.experts = Experts(config, sharing, init)
        if shared is not None:
            self.shared = shared
        self.dispatch = (ops.dispatch or choose_dispatch)(config, sharing.replicas)
        self.balance = Balance(config, sharing, ops.records_routes)
        self.devices, self.token_devices = sharing.width_devices, sharing.token_devices

    def __call__(self, x_BLD: jax.Array, context: Context, dot: Dot) -> tuple[jax.Array, Aux]:
        """Transform each token, `[B, L, D] -> [B, L, D]`, and return the auxiliary output."""
        x_BLD = self.devices.enter(x_BLD)
        given_BLK = self._given(x_BLD, context)
        routes = self.router(x_BLD, self.balance.bias(context), given_BLK)
        real_BL = real_tokens(context.rows)
        if real_BL is not None:
            routes = routes._replace(real_BL=self.token_devices.own_tokens(real_BL))
        weights_BLK = routes.weights_BLK.astype(x_BLD.dtype)
        y_BLD, dropped = self.dispatch(x_BLD, weights_BLK, routes.taken_BLK, self.experts, dot)
        if self.balance.config.shared_experts:
            shared = self.shared if self.token_devices.size > 1 else self.shared.of_whole
            y_BLD += shared(x_BLD, dot)
        aux = self.balance.aux_outputs(routes, dropped, context.index, real_BL)
        return self.devices.leave(y_BLD), aux

    def _given(self, x_BLD: jax.Array, context: Context) -> jax.Array | None:
        """This layer's recorded choice in the microbatch, `[B, L, K]`; None if there is none."""
        routes = context.rows.get(ROUTES)
        if routes is None:
            return None
        place = jnp.argmax(jnp.asarray(self.balance.config.sparse_layers) == context.index)
        return self.token_devices.own_tokens(jnp.take(routes, place, axis=2))


def choose_dispatch(
    config: MixtureConfig, replicas: AllExperts, product: Product = lax.ragged_dot
) -> Dispatch:
    """Return the dispatch of a model's sparse layers; `product` is the grouped product."""
    if config.capacity_factor:
        return CapacityDispatch(config.n_experts, replicas, config.capacity_factor)
    of = HostDispatch if replicas.per_host > 1 else DroplessDispatch
    return of(config.n_experts, replicas, product)
