"""A mixture of experts in the place of an MLP."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Aux, Context
from jaxpipe.model.layers.moe.balance import LOADS, ROUTES, Balance, real_tokens
from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.moe.dispatch import SLOTS
from jaxpipe.model.layers.moe.experts import Experts, choose_dispatch
from jaxpipe.model.layers.moe.router import CHOICE, Router
from jaxpipe.model.layers.parts import Dot, Init
from jaxpipe.model.options import LayerParts

KEEP = (CHOICE, LOADS, SLOTS)  # checkpoint names that F stores under every `train.remat`


class MixtureOfExperts(nnx.Module):
    """Routed experts and `shared`, an MLP that takes every token; None: no shared experts."""

    def __init__(
        self, config: MixtureConfig, parts: LayerParts, init: Init, shared: nnx.Module | None
    ):
        self.router = Router(config, parts, init)
        self.experts = Experts(config, parts.devices, init)
        if shared is not None:
            self.shared = shared
        sharing, ops = parts.sharing, parts.ops
        self.dispatch = (ops.dispatch or choose_dispatch)(config, sharing.replicas)
        self.balance = Balance(config, sharing.devices, sharing.sequence, ops.records_routes)
        self.devices = sharing.devices

    def __call__(self, x_BLD: jax.Array, context: Context, dot: Dot) -> tuple[jax.Array, Aux]:
        """Transform each token, `[B, L, D] -> [B, L, D]`, and return the auxiliary output."""
        x_BLD = self.devices.enter(x_BLD)
        given_BLK = self._given(x_BLD, context)
        routes = self.router(x_BLD, self.balance.bias(context), given_BLK)
        routes = routes._replace(real_BL=real_tokens(context.rows))
        weights_BLK = routes.weights_BLK.astype(x_BLD.dtype)
        y_BLD, dropped = self.dispatch(x_BLD, weights_BLK, routes.taken_BLK, self.experts, dot)
        if self.balance.config.shared_experts:
            y_BLD += self.shared.of_whole(x_BLD, dot)
        aux = self.balance.aux_outputs(routes, dropped, context.index)
        return self.devices.leave(y_BLD), aux

    def _given(self, x_BLD: jax.Array, context: Context) -> jax.Array | None:
        """This layer's recorded choice in the microbatch, `[B, L, K]`; None if there is none."""
        routes = context.rows.get(ROUTES)
        if routes is None:
            return None
        place = jnp.argmax(jnp.asarray(self.balance.config.sparse_layers) == context.index)
        return jnp.take(routes, place, axis=2)
