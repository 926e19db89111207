"""A dispatch that sends a token to a host once, however many of its experts are there.

Shapes: as in `experts.py`, with H hosts. A token has up to H rows here, one for each host that has
some of its experts: row H n + h is that of token n for host h.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract.experts import AllExperts
from jaxpipe.model.layers.moe.dispatch import assign_equally, gather_into_slots, sum_from_slots
from jaxpipe.model.layers.moe.experts import (
    DroplessDispatch,
    Experts,
    Made,
    exchange_rows,
    send_rows,
)
from jaxpipe.model.layers.moe.products import Product
from jaxpipe.model.layers.parts import Dot


@dataclass(frozen=True)
class HostDispatch:
    """Send each token once to every host that has experts of it, and spread it inside the host.

    A device sends a token with the weights and numbers of its experts in 2 K more columns to the
    device of the other host that has the same place there. That one dispatches what it receives
    among the devices of its host (`DroplessDispatch`), and returns the sum of a token's outputs
    (two-stage all-to-all: Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.3; DeepSeek-AI 2024,
    section 3.2.2). Tokens that overflow a buffer between hosts lose their experts in that host.

    Attributes:
      count: routed experts of a layer.
      replicas: the devices that share the experts.
      product: the grouped product.
    """

    count: int
    replicas: AllExperts
    product: Product

    def __call__(
        self,
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        choice_BLK: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> Made:
        """See `Dispatch`."""
        hosts, copies = self.replicas.between_hosts, choice_BLK.shape[-1]
        x_ND, own = x_BLD.reshape(-1, x_BLD.shape[-1]), self.count // hosts.size
        host_H = jnp.arange(hosts.size)
        number_NHK = choice_BLK.reshape(-1, 1, copies) - own * host_H[None, :, None]
        is_there_NHK = (number_NHK >= 0) & (number_NHK < own)
        host_NH = jnp.where(is_there_NHK.any(-1), host_H[None], hosts.size)
        places = assign_equally(host_NH.reshape(-1), hosts.size, self.room(len(x_ND), copies))
        weights_NHK = jnp.where(is_there_NHK, weights_BLK.reshape(-1, 1, copies), 0)
        number_NHK = jnp.where(is_there_NHK, number_NHK + 1, 0)  # 0 marks no expert of this host
        beside_NHX = jnp.concatenate([weights_NHK, number_NHK.astype(x_ND.dtype)], axis=-1)
        x_SD, beside_SX = send_rows(
            hosts,
            gather_into_slots(x_ND, places, hosts.size),
            gather_into_slots(beside_NHX.reshape(-1, 2 * copies), places, 1),
        )
        weights_SK, number_SK = jnp.split(beside_SX, 2, axis=-1)
        number_SK = lax.stop_gradient(number_SK).astype(jnp.int32)
        choice_SK = jnp.where(number_SK > 0, number_SK - 1, own)
        in_host = self.replicas.in_host
        in_host = replace(in_host, room=in_host.room * len(x_ND) / len(x_SD))
        of_host = DroplessDispatch(own, in_host, self.product)
        made_1SD, dropped = of_host(x_SD[None], weights_SK[None], choice_SK[None], experts, dot)
        y_SD = exchange_rows(hosts, made_1SD[0], "tokens")
        lost_R = places.target_R == places.source_S.size
        lost = jnp.sum(is_there_NHK.sum(-1, dtype=jnp.int32).reshape(-1) * lost_R)
        return sum_from_slots(y_SD, places, hosts.size).reshape(x_BLD.shape), dropped + lost

    def room(self, tokens: int, copies: int) -> int:
        """Tokens that a device with `tokens` of them can send to each host.

        Their mean number is that of experts chosen evenly, `copies` of `count`.
        """
        own = self.count // (self.replicas.size // self.replicas.per_host)
        share = 1 - math.comb(self.count - own, copies) / math.comb(self.count, copies)
        return min(math.ceil(self.replicas.room * share * tokens), tokens) or tokens
