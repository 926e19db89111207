"""The experts' matrices, and two ways to dispatch tokens to them.

Shapes: N tokens of B examples, K experts per token, R = N K rows, S slots, D model, F an expert's
hidden width, E experts on a device. A row's weight travels with the row and is multiplied in before
the last product, or before the first (`Variant.weighs_inputs`), so that the experts' outputs need
not be stored for the weight's gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.experts import AllExperts
from jaxpipe.core.contract.layer import PRODUCT
from jaxpipe.core.contract.parameter import EP, TP, ParamSpec
from jaxpipe.model.layers.gated import gated, hidden_products
from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.moe.dispatch import (
    assign_equally,
    assign_groups,
    count_dropped,
    gather_into_slots,
    sum_from_slots,
)
from jaxpipe.model.layers.moe.products import Product
from jaxpipe.model.layers.pairing import Names, Rounds, pairing_point
from jaxpipe.model.layers.parts import Dot, Init
from jaxpipe.model.options import Sharing

# From vectors of each expert, `[E, X]`, those of each row's own expert, in the dtype of the rows.
Select = Callable[[jax.Array], jax.Array]
Made = tuple[jax.Array, jax.Array]
PRODUCTS = "expert_gate", "expert_up", "expert_down"  # names under which `dot` gets the matrices


class Experts(nnx.Module):
    """Experts, as SwiGLU's down(silu(gate(x)) * up(x)); matrices are `[E, in, out]`.

    Devices along tp share the width of each expert, or have different experts
    (`AllExperts.over_tp`). Experts may have biases, `[E, out]`; devices that share one add up that
    of the last product.
    """

    def __init__(self, config: MixtureConfig, sharing: Sharing, init: Init):
        e, d, f = config.n_experts, config.d_model, config.expert_width
        variant, are_whole = config.VARIANT, sharing.replicas.over_tp
        size = 1 if are_whole else sharing.devices.size
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        outputs, inputs = (
            ParamSpec(sharded=((EP, 0), (TP, 0 if are_whole else dim))) for dim in (2, 1)
        )
        self.hidden = hidden_products(variant.gate)
        for name in self.hidden:
            setattr(self, f"w_{name}", init(f"experts/w_{name}", (e, d, f), 0.02, outputs))
        self.w_down = init("experts/w_down", (e, f, d), out_std, inputs)
        if variant.has_expert_biases:
            summed = ParamSpec(sharded=((EP, 0),), partial_grad_axes=(TP,) if size > 1 else ())
            for name in self.hidden:
                setattr(self, f"b_{name}", init(f"experts/b_{name}", (e, f), 0.0, inputs))
            self.b_down = init("experts/b_down", (e, d), 0.0, inputs if are_whole else summed)
        self.variant, self.size = variant, size

    def __call__(self, x: jax.Array, weights: jax.Array, dot: Dot, own: Select) -> jax.Array:
        """Transform rows `[..., D]` times `weights [..., 1]`; a partial sum per device along tp."""
        x = x * weights if self.variant.weighs_inputs else x
        matrices = {f"expert_{name}": getattr(self, f"w_{name}")[...] for name in self.hidden}
        products = dot(x, **matrices)
        if self.variant.has_expert_biases:
            biases = (own(getattr(self, f"b_{name}")[...]) for name in self.hidden)
            products = tuple(y + bias for y, bias in zip(products, biases))
        hidden = gated(self.variant.gate, *products)
        hidden = hidden if self.variant.weighs_inputs else hidden * weights
        (down,) = dot(hidden, expert_down=self.w_down[...])
        if not self.variant.has_expert_biases:
            return down
        return down + weights * (own(self.b_down[...]) / self.size)


def own_of_batches(values_EX: jax.Array) -> jax.Array:
    """The vectors of experts whose rows are batched, `[E, rows, ...]`."""
    return values_EX[:, None]


class Dispatch(Protocol):
    """A way to bring tokens to experts, and the experts' outputs back."""

    def __call__(
        self,
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        choice_BLK: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> Made:
        """Return the weighted sum of each token's expert outputs, `[B, L, D]`, and dropped rows.

        A token whose choice is the number of routed experts or more is padding: it is sent nowhere,
        takes no slot, and is not counted. `dot` computes the products.
        """


@dataclass(frozen=True)
class DroplessDispatch:
    """Sort rows by expert, and multiply each group of rows with its own matrix.

    With expert parallelism every row is sent to the device that has its expert, in buffers of
    equal size and with its weight and expert number in two more columns; the receiver sorts the
    rows. Only rows that overflow such a buffer are dropped.

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
        copies, x_ND = choice_BLK.shape[-1], x_BLD.reshape(-1, x_BLD.shape[-1])
        weights_R1, expert_R = weights_BLK.reshape(-1, 1), choice_BLK.reshape(-1)
        if self.replicas.size == 1:
            y_ND = self._grouped(x_ND, weights_R1, expert_R, experts, dot)
            return y_ND.reshape(x_BLD.shape), jnp.int32(0)
        own, room = self.count // self.replicas.size, self.room(len(x_ND), copies)
        places = assign_equally(expert_R // own, self.replicas.size, room)
        number_R1 = (1 + expert_R % own).astype(x_ND.dtype)[:, None]  # 0 marks an empty slot
        beside_R2 = jnp.concatenate([weights_R1, number_R1], axis=-1)
        x_SD, beside_S2 = send_rows(
            self.replicas,
            gather_into_slots(x_ND, places, copies),
            gather_into_slots(beside_R2, places, 1),
        )
        weights_S1, number_S1 = jnp.split(beside_S2, 2, axis=-1)
        number_S = lax.stop_gradient(number_S1).astype(jnp.int32).reshape(-1)
        expert_S = jnp.where(number_S > 0, number_S - 1, own)
        made_SD = self._grouped(x_SD, weights_S1, expert_S, experts, dot)
        y_SD = exchange_rows(self.replicas, made_SD, "tokens")
        dropped = count_dropped(places, expert_R // own, self.replicas.size)
        return sum_from_slots(y_SD, places, copies).reshape(x_BLD.shape), dropped

    def room(self, tokens: int, copies: int) -> int:
        """Rows that a device with `tokens` tokens can send to each device."""
        size = self.replicas.size
        most = tokens * min(copies, self.count // size)
        mean = self.replicas.room * tokens * copies / size
        return min(math.ceil(mean), most) if mean else most

    def _grouped(
        self,
        x_ND: jax.Array,
        weights_R1: jax.Array,
        expert_R: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> jax.Array:
        """Weighted sum of each token's outputs from this device's experts, `[N, D]`.

        An expert number past the last of them stands for no expert, and adds nothing.
        """
        copies, count = len(expert_R) // len(x_ND), self.count // self.replicas.size
        places, sizes_E = assign_groups(expert_R, count, dot.row_multiple)

        def own(values_EX: jax.Array) -> jax.Array:
            """As a product, because the gradient of a gather would be a scatter."""
            which_SE = jax.nn.one_hot(expert_R[places.source_S], count, dtype=x_ND.dtype)
            return which_SE @ values_EX.astype(x_ND.dtype)

        grouped = dot.grouped(self.product, sizes_E)
        x_SD, weights_S1 = (
            gather_into_slots(x_ND, places, copies),
            gather_into_slots(weights_R1, places, 1),
        )
        return sum_from_slots(experts(x_SD, weights_S1, grouped, own), places, copies)


@dataclass(frozen=True)
class CapacityDispatch:
    """Give every expert the same number of slots for each sequence; rows beyond them are dropped.

    An expert has `factor` times the mean number of a sequence's choices, and the sequence's first
    tokens take slots first. Products are batched and have one shape (Fedus et al. 2021, "Switch
    Transformers"), that of a row without padding; a shorter sequence fills only as many of the
    slots as its own length would have.
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
        """See `Dispatch`."""
        (examples, length, copies), size = choice_BLK.shape, self.replicas.size
        room, d = self.room(length, copies), x_BLD.shape[-1]
        group_BLK = choice_BLK * examples + jnp.arange(examples)[:, None, None]
        group_R, groups = group_BLK.reshape(-1), self.count * examples
        rooms = jnp.array([self.room(n, copies) for n in range(length + 1)], jnp.int32)
        most_B = rooms[jnp.sum(choice_BLK[..., 0] < self.count, axis=1)]
        places = assign_equally(group_R, groups, room, jnp.tile(most_B, self.count))
        sent = send_rows(
            self.replicas,
            gather_into_slots(x_BLD.reshape(-1, d), places, copies),
            gather_into_slots(weights_BLK.reshape(-1, 1), places, 1),
        )
        own = self.count // size
        x_ECD, weights_EC1 = (
            rows.reshape(size, own, -1, rows.shape[-1])
            .swapaxes(0, 1)
            .reshape(own, -1, rows.shape[-1])
            for rows in sent
        )
        outputs = experts(x_ECD, weights_EC1, dot, own_of_batches)
        outputs = outputs.reshape(own, size, -1, d).swapaxes(0, 1)
        y_SD = exchange_rows(self.replicas, outputs.reshape(-1, d), "tokens")
        dropped = count_dropped(places, group_R, groups)
        return sum_from_slots(y_SD, places, copies).reshape(x_BLD.shape), dropped

    def room(self, length: int, copies: int) -> int:
        """Slots of an expert for one sequence of this length."""
        return min(math.ceil(self.factor * length * copies / self.count), length)


def exchange_in_turn(forward: Names, gradient: Names) -> Rounds:
    """Pair F of a layer with the gradient of another, so that all-to-alls overlap with products.

    In each round one of them exchanges rows while the other computes: attention, experts, experts,
    attention. It is DualPipe's order (DeepSeek-AI 2024, "DeepSeek-V3", figure 4).
    """
    return [("to experts", "to tokens"), ("at experts", "at experts"), ("to tokens", "to experts")]


def send_rows(
    replicas: AllExperts, x_SD: jax.Array, beside_SX: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Send rows to their experts, with what belongs to them in further columns of one array."""
    if replicas.size == 1:
        return x_SD, beside_SX
    came = exchange_rows(replicas, jnp.concatenate([x_SD, beside_SX], axis=-1), "experts")
    came = checkpoint_name(came, PRODUCT)  # or B sends the rows again
    x_SD, beside_SX = jnp.split(came, [x_SD.shape[1]], axis=-1)
    return x_SD, beside_SX


def exchange_rows(replicas: AllExperts, rows: jax.Array, to: str) -> jax.Array:
    """All-to-all of rows between two pairing points, which `exchange_in_turn` names."""
    if replicas.size == 1:
        return rows
    return pairing_point(replicas.exchange(pairing_point(rows, f"to {to}")), f"at {to}")
