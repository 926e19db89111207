"""A mixture of experts in the place of an MLP."""

import jax
from flax import nnx

from jaxpipe.contract import Context, Side
from jaxpipe.model.moe.balance import LOADS, Balance
from jaxpipe.model.moe.config import MixtureConfig
from jaxpipe.model.moe.experts import Experts, dispatch_of
from jaxpipe.model.moe.router import CHOICE, Router
from jaxpipe.model.parts import Init, Parts

KEEP = (CHOICE, LOADS)  # what F stores whatever is rematerialised


class Mixture(nnx.Module):
    """Routed experts, and `shared`, which makes its summand of the whole stream; None: nothing."""

    def __init__(self, config: MixtureConfig, parts: Parts, init: Init, shared: nnx.Module | None):
        self.router, self.experts = Router(config, parts, init), Experts(config, init)
        if shared is not None:
            self.shared = shared
        self.dispatch, self.parts = dispatch_of(config, parts.replicas), parts
        self.balance = Balance(config, parts.devices, parts.attend.sequence)

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Side]:
        """Transform each token, `[B, L, D] -> [B, L, D]`, and tell of it."""
        x_BLD = self.parts.devices.enter(x_BLD)
        routes = self.router(x_BLD, self.balance.bias(context))
        weights_BLK = routes.weights_BLK.astype(x_BLD.dtype)
        y_BLD, dropped = self.dispatch(x_BLD, weights_BLK, routes.choice_BLK, self.experts)
        if self.balance.config.shared_experts:
            y_BLD += self.shared.of_whole(x_BLD)
        side = self.balance.side(routes, dropped, context.index)
        return self.parts.devices.leave(y_BLD), side
