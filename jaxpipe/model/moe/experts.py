"""The experts' matrices, and two ways of bringing tokens to them.

Shapes: N tokens of B examples, K experts a token, R = N K rows, S slots, D model, F an expert's
hidden width, E experts that a device has. A row's weight goes with it and is multiplied with before
the last product, so that what an expert makes need not be stored for the weight's gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.contract import Names, Rounds, point
from jaxpipe.model.moe.config import MixtureConfig
from jaxpipe.model.moe.dispatch import (
    counts_of,
    dropped_of,
    equal_places,
    from_slots,
    into_slots,
    sorted_places,
)
from jaxpipe.model.moe.products import Product
from jaxpipe.model.parts import Dot, Init
from jaxpipe.partition.experts import AllExperts
from jaxpipe.partition.leaf import EP, TP, Leaf

Multiply = Callable[..., tuple[jax.Array, ...]]  # rows with their experts' matrices, as a `Dot`
Made = tuple[jax.Array, jax.Array]
PRODUCTS = "expert_gate", "expert_up", "expert_down"  # the matrices by the names that `dot` gets


class Experts(nnx.Module):
    """SwiGLU experts, down(silu(gate(x)) * up(x)), as `[E, in, out]` of each matrix."""

    def __init__(self, config: MixtureConfig, init: Init):
        e, d, f = config.n_experts, config.d_model, config.expert_width
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        outputs, inputs = (Leaf(cuts=((EP, 0), (TP, dim))) for dim in (2, 1))
        self.w_gate = init("experts/w_gate", (e, d, f), 0.02, outputs)
        self.w_up = init("experts/w_up", (e, d, f), 0.02, outputs)
        self.w_down = init("experts/w_down", (e, f, d), out_std, inputs)

    def __call__(self, x: jax.Array, weights: jax.Array, dot: Multiply) -> jax.Array:
        """Transform rows `[..., D]` times `weights [..., 1]`; of devices along tp a summand."""
        gate, up = dot(x, expert_gate=self.w_gate[...], expert_up=self.w_up[...])
        (down,) = dot(jax.nn.silu(gate) * up * weights, expert_down=self.w_down[...])
        return down


class Dispatch(Protocol):
    """A way of bringing tokens to experts and what these make back."""

    def __call__(
        self,
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        choice_BLK: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> Made:
        """`[B, L, D]`: the weighted sum of what a token's experts make; how many rows dropped.

        A token whose choice is no expert's number, but past the last one, is padding: it goes
        nowhere, takes no one's place, and is not counted. Of products of one shape `dot` makes all.
        """


@dataclass(frozen=True)
class Dropless:
    """Rows are sorted by expert, and a product takes each group with its own matrix.

    Replicas that have experts in parts send every row to the one that has its expert, in buffers of
    equal size, with its weight and expert in two more columns; what comes is sorted there. Only
    what such a buffer has no room for is dropped.
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
        """As `Dispatch` says."""
        copies, x_ND = choice_BLK.shape[-1], x_BLD.reshape(-1, x_BLD.shape[-1])
        weights_R1, expert_R = weights_BLK.reshape(-1, 1), choice_BLK.reshape(-1)
        if self.replicas.size == 1:
            y_ND = self._grouped(x_ND, weights_R1, expert_R, experts)
            return y_ND.reshape(x_BLD.shape), jnp.int32(0)
        own, room = self.count // self.replicas.size, self.room(len(x_ND), copies)
        places = equal_places(expert_R // own, self.replicas.size, room)
        number_R1 = (1 + expert_R % own).astype(x_ND.dtype)[:, None]  # 0 is that of an empty slot
        beside_R2 = jnp.concatenate([weights_R1, number_R1], axis=-1)
        sent = [into_slots(x_ND, places, copies), into_slots(beside_R2, places, 1)]
        came = _exchanged(self.replicas, jnp.concatenate(sent, axis=-1), "experts")
        x_SD, weights_S1, number_S1 = jnp.split(came, [x_ND.shape[1], x_ND.shape[1] + 1], axis=-1)
        number_S = lax.stop_gradient(number_S1).astype(jnp.int32).reshape(-1)
        expert_S = jnp.where(number_S > 0, number_S - 1, own)
        made_SD = self._grouped(x_SD, weights_S1, expert_S, experts)
        y_SD = _exchanged(self.replicas, made_SD, "tokens")
        dropped = dropped_of(places, expert_R // own, self.replicas.size)
        return from_slots(y_SD, places, copies).reshape(x_BLD.shape), dropped

    def room(self, tokens: int, copies: int) -> int:
        """Rows that so many tokens of a device can send to each device."""
        size = self.replicas.size
        most = tokens * min(copies, self.count // size)
        mean = self.replicas.room * tokens * copies / size
        return min(math.ceil(mean), most) if mean else most

    def _grouped(
        self, x_ND: jax.Array, weights_R1: jax.Array, expert_R: jax.Array, experts: Experts
    ) -> jax.Array:
        """The weighted sum of what a token's rows make, `[N, D]`, of experts on this device.

        An expert that is not one of these is none, and makes nothing.
        """
        copies, places = len(expert_R) // len(x_ND), sorted_places(expert_R)
        sizes = counts_of(expert_R, self.count // self.replicas.size)

        def dot(rows: jax.Array, **matrices: jax.Array) -> tuple[jax.Array, ...]:
            every = (each.astype(rows.dtype) for each in matrices.values())
            return tuple(self.product(rows, each, sizes) for each in every)

        x_SD, weights_S1 = into_slots(x_ND, places, copies), into_slots(weights_R1, places, 1)
        return from_slots(experts(x_SD, weights_S1, dot), places, copies)


@dataclass(frozen=True)
class Capacity:
    """Every expert has the same number of slots for each sequence; rows that find none are dropped.

    The slots are `factor` times the mean of what a sequence's tokens choose, and its first tokens
    come first. Products are batched, of one shape (Fedus et al. 2021, "Switch Transformers"): that
    of a row without padding, of which a shorter sequence fills no more than would be its own.
    """

    count: int
    replicas: AllExperts
    factor: float

    def __call__(
        self,
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        choice_BLK: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> Made:
        """As `Dispatch` says."""
        (examples, length, copies), size = choice_BLK.shape, self.replicas.size
        room, d = self.room(length, copies), x_BLD.shape[-1]
        group_BLK = choice_BLK * examples + jnp.arange(examples)[:, None, None]
        group_R, groups = group_BLK.reshape(-1), self.count * examples
        rooms = jnp.array([self.room(n, copies) for n in range(length + 1)], jnp.int32)
        most_B = rooms[jnp.sum(choice_BLK[..., 0] < self.count, axis=1)]
        places = equal_places(group_R, groups, room, jnp.tile(most_B, self.count))
        x_SD = into_slots(x_BLD.reshape(-1, d), places, copies)
        weights_S1 = into_slots(weights_BLK.reshape(-1, 1), places, 1)
        sent = jnp.concatenate([x_SD, weights_S1], axis=-1)
        came = _exchanged(self.replicas, sent, "experts")
        of_expert = came.reshape(size, self.count // size, -1, d + 1).swapaxes(0, 1)
        of_expert = of_expert.reshape(self.count // size, -1, d + 1)
        made = experts(of_expert[..., :d], of_expert[..., d:], dot)
        made = made.reshape(self.count // size, size, -1, d).swapaxes(0, 1)
        y_SD = _exchanged(self.replicas, made.reshape(-1, d), "tokens")
        dropped = dropped_of(places, group_R, groups)
        return from_slots(y_SD, places, copies).reshape(x_BLD.shape), dropped

    def room(self, length: int, copies: int) -> int:
        """Slots of an expert for the tokens of one sequence."""
        return min(math.ceil(self.factor * length * copies / self.count), length)


def dispatch_of(config: MixtureConfig, replicas: AllExperts, product: Product) -> Dispatch:
    """How the tokens of a model's sparse layers come to their experts, and how these multiply."""
    if config.capacity_factor:
        return Capacity(config.n_experts, replicas, config.capacity_factor)
    return Dropless(config.n_experts, replicas, product)


def in_rounds(forward: Names, gradient: Names) -> Rounds:
    """How F of a layer runs beside the gradient of another, where replicas exchange rows.

    One's exchange beside the other's products: attention, then experts, experts, attention. It is
    the order of DualPipe's authors (DeepSeek-AI 2024, "DeepSeek-V3", figure 4).
    """
    return [("to experts", "to tokens"), ("at experts", "at experts"), ("to tokens", "to experts")]


def _exchanged(replicas: AllExperts, rows: jax.Array, to: str) -> jax.Array:
    """Rows as `exchange` leaves them; before and after it is a point, for `in_rounds`."""
    if replicas.size == 1:
        return rows
    return point(replicas.exchange(point(rows, f"to {to}")), f"at {to}")
