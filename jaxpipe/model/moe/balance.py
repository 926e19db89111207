"""What keeps experts evenly used, and what is counted of them.

Shapes: B examples, L tokens, E routed experts, K experts a token, S sparse layers. Everything is a
sum over tokens, so that no number depends on how a batch is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.contract import Context, Side
from jaxpipe.model.moe.config import MixtureConfig
from jaxpipe.model.moe.router import Routes
from jaxpipe.partition.devices import OneDevice
from jaxpipe.partition.sequence import WholeSequence

ROUTES = "routes"  # the leaf of a batch that has a choice from outside
REAL = "real"  # of one whose rows may end in padding, 1 at tokens, where no documents tell it
LOADS = "loads"  # the name of what replicas that share a sequence tell each other, which F keeps


@dataclass(frozen=True)
class Balance:
    """The losses, counts and biases of a model's sparse layers.

    `devices` share a layer, and replicas a `sequence`. Routes may be `recorded`: given back as the
    batch's leaf that replays them.
    """

    config: MixtureConfig
    devices: OneDevice
    sequence: WholeSequence
    recorded: bool = False

    @property
    def variables(self) -> Any:
        """The first values of the biases on the choice, `[S, E]`; None: there are none."""
        if not self.config.router_bias_rate:
            return None
        layers = len(self.config.sparse_layers)
        return {"router_bias": np.zeros((layers, self.config.n_experts), np.float32)}

    def next_variables(self, variables: Any, side: Side) -> Any:
        """A bias rises where fewer tokens than the mean chose, and falls where more did.

        Of all tokens of a step, by the same for each expert, or by how far it is from the mean, as
        a share of that (Wang et al. 2024, "Auxiliary-loss-free load balancing", section 4.3).
        """
        counts, bias = side.sums["expert_counts"], variables["router_bias"]
        mean, rest = _mean(counts)
        # The difference first: float32 does not tell counts above 2^24 from their neighbours.
        few = (mean[:, None] - counts) + rest[:, None]
        few /= jnp.maximum(mean + rest, 1)[:, None]  # a step may be of nothing but padding
        few = jnp.sign(few) if self.config.router_bias_step == "sign" else few
        return {"router_bias": bias + self.config.router_bias_rate * few.astype(bias.dtype)}

    def bias(self, context: Context) -> jax.Array | None:
        """That of the layer whose context this is, `[E]`; None: it has none."""
        if not self.config.router_bias_rate:
            return None
        here_S = jnp.asarray(self.config.sparse_layers) == context.index
        bias_SE = context.variables["router_bias"]
        return jnp.sum(bias_SE * here_S[:, None].astype(bias_SE.dtype), axis=0)

    def side(self, routes: Routes, dropped: jax.Array, layer: jax.Array) -> Side:
        """Loss and counts of the sparse layer that is the `layer`-th of all layers; its routes."""
        here_S = jnp.asarray(self.config.sparse_layers) == layer

        def of_layer(value: jax.Array) -> jax.Array:
            return value[None] * here_S.reshape(-1, *(1,) * value.ndim).astype(value.dtype)

        shares_BLE, counts_BE = routes.of_real(routes.shares_BLE), self._counts(routes.taken_BLK)
        loss = self._loss(shares_BLE, counts_BE, routes)
        entropy = jax.scipy.special.entr(shares_BLE).sum()
        sums = {
            "expert_counts": counts_BE.sum(0, dtype=jnp.int32),
            "expert_rows_dropped": dropped,
            "router_entropy": lax.stop_gradient(entropy),
        }
        if loss is not None:
            sums["router_loss"] = lax.stop_gradient(loss)
        rows = {}
        if self.recorded:
            own_BLSK = routes.choice_BLK[:, :, None] * here_S[None, None, :, None]
            rows[ROUTES] = own_BLSK.astype(jnp.int32)
        return Side(loss, {name: of_layer(value) for name, value in sums.items()}, rows=rows)

    def report(self, side: Side) -> Mapping[str, jax.Array]:
        """What is logged of a step: loads by layer, the share dropped, entropy and loss a token."""
        counts, dropped = side.sums["expert_counts"], side.sums["expert_rows_dropped"]
        mean = sum(_mean(counts))
        rows = jnp.maximum(mean * self.config.n_experts, 1)  # a step may be of nothing but padding
        tokens = rows / self.config.experts_per_token
        means = [name for name in ("router_entropy", "router_loss") if name in side.sums]
        return {
            "expert_load_max": counts.max(1),
            "expert_load_mean": mean,
            # Every sparse layer routes the same tokens; their rows together may pass 2^31.
            "expert_dropped_share": (dropped / rows).mean(),
        } | {name: side.sums[name] / tokens for name in means}

    def _counts(self, choice_BLK: jax.Array) -> jax.Array:
        """Of every example, how many of its real tokens chose an expert: `[B, E]`."""
        experts = jnp.arange(self.config.n_experts)
        chosen = choice_BLK[..., None] == experts[None, None, None]
        return chosen.sum((1, 2), dtype=jnp.int32)

    def _loss(
        self, shares_BLE: jax.Array, counts_BE: jax.Array, routes: Routes
    ) -> jax.Array | None:
        """A sum over tokens, which every device along tp has, and each its part of the gradient.

        Of the real ones: the shares of others are zeros.
        """
        config, loss = self.config, 0.0
        if config.router_aux_loss:
            loss += config.router_aux_loss * self._unevenness(shares_BLE, counts_BE)
        if config.router_z_loss:
            z_BL1 = jax.nn.logsumexp(routes.logits_BLE, axis=-1, keepdims=True)
            loss += config.router_z_loss * jnp.sum(routes.of_real(z_BL1 * z_BL1))
        if isinstance(loss, float):
            return None
        part = loss / self.devices.size
        return part + lax.stop_gradient(loss - part)

    def _unevenness(self, shares_BLE: jax.Array, counts_BE: jax.Array) -> jax.Array:
        """A sum over tokens: 1 of each where loads are even.

        Of each sequence E times the sum over experts of f P: f is the share of its tokens' choices
        that an expert has, P the mean share of its scores (DeepSeek-AI 2024, equations 17-20; Fedus
        et al. 2021, equation 4). So it is the same however sequences are divided into microbatches
        and among replicas, and padded.
        """
        shares_BE = shares_BLE.sum(1)
        own_B1X = jnp.concatenate([counts_BE.astype(shares_BE.dtype), shares_BE], -1)[:, None]
        every_BX = self.sequence.gather(own_B1X).sum(1)
        if self.sequence.size > 1:
            every_BX = checkpoint_name(every_BX, LOADS)
        count_BE, share_BE = jnp.split(every_BX, 2, axis=-1)
        copies, count_BE = self.config.experts_per_token, lax.stop_gradient(count_BE)
        choices_B1 = jnp.maximum(count_BE.sum(-1, keepdims=True), 1)
        f_BE, tokens_B1 = count_BE / choices_B1, choices_B1 / copies
        even_B = self.config.n_experts * jnp.sum(f_BE * share_BE / tokens_B1, -1)
        return jnp.sum(counts_BE.sum(-1) / copies * even_B)


def count_tokens(rows: Mapping[str, jax.Array]) -> jax.Array:
    """The number of tokens of a microbatch that routers send to experts: those of no padding."""
    real_BL = real_tokens(rows)
    return jnp.asarray(rows["inputs"].size if real_BL is None else real_BL.sum(), jnp.int32)


def real_tokens(rows: Mapping[str, jax.Array]) -> jax.Array | None:
    """Which tokens of a microbatch are no padding, `[B, L]`; None: all.

    Packed rows tell it by their `segments`, others that may end in padding by `real`.
    """
    if "segments" in rows:
        return rows["segments"] >= 0
    return rows[REAL] > 0 if REAL in rows else None


def _mean(counts_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean count of each layer's experts: its integer part, and the rest of it, `[S]`.

    No sum is larger than what it is a mean of, so none can pass the largest int32.
    """
    experts = counts_SE.shape[1]
    rest_S = (counts_SE % experts).sum(1)
    return (counts_SE // experts).sum(1) + rest_S // experts, rest_S % experts / experts
