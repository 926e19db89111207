"""Load balancing of experts: router losses, biases on the choice, and logged statistics.

Shapes: B examples, L tokens, E routed experts, K experts per token, S sparse layers. Every
statistic is a sum over tokens, so that it does not depend on how a batch is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract import Aux, Context
from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.moe.router import Routes
from jaxpipe.model.options import UNSHARED, Sharing

BIAS = "router_bias"  # variable of the biases on the choice
ROUTES = "routes"  # batch key of a recorded choice of experts
REAL = "real"  # batch key that is 1 at tokens and 0 at padding, for rows without `segments`
LOADS = "loads"  # checkpoint name of loads that devices have added up, which F always stores


@dataclass(frozen=True)
class Balance:
    """Losses, statistics and biases that keep the experts of a model's sparse layers evenly loaded.

    Attributes:
      config: sizes, weights of the losses, and the rate of the biases.
      sharing: the devices that share each sequence, along tp and by context parallelism.
      recorded: whether `aux_outputs` also returns the choices, as the batch key that replays them.
    """

    config: MixtureConfig
    sharing: Sharing = UNSHARED
    recorded: bool = False

    @property
    def variables(self) -> Any:
        """Initial biases on the choice, `[S, E]` float32; None without biases.

        In families whose table of tokens chooses the experts of some layers, S counts the others.
        """
        if not self.config.has_router_bias:
            return None
        layers = len(self.config.variable_layers(BIAS))
        return {BIAS: np.zeros((layers, self.config.n_experts), np.float32)}

    def next_variables(self, variables: Any, aux: Aux) -> Any:
        """Raise the biases of experts with fewer tokens than the mean, and lower those with more.

        Counts are those of a whole step. The rate multiplies the sign of the difference, or the
        difference as a share of the mean (Wang et al. 2024, "Auxiliary-loss-free load balancing",
        section 4.3).
        """
        counts, bias = aux.sums["expert_counts"], variables[BIAS]
        if len(bias) < len(counts):
            layers = self.config.variable_layers(BIAS)
            counts = counts[np.isin(self.config.sparse_layers, layers)]
        mean, rest = _mean(counts)
        # Subtract the integers first: float32 cannot represent every count above 2^24.
        few = (mean[:, None] - counts) + rest[:, None]
        few /= jnp.maximum(mean + rest, 1)[:, None]  # a step may be all padding
        few = jnp.sign(few) if self.config.router_bias_step == "sign" else few
        return {BIAS: bias + self.config.router_bias_rate * few.astype(bias.dtype)}

    def bias(self, context: Context) -> jax.Array | None:
        """Bias of the layer that the context belongs to, `[E]`; None without biases."""
        if not self.config.has_router_bias:
            return None
        here_S = jnp.asarray(self.config.variable_layers(BIAS)) == context.index
        bias_SE = context.variables[BIAS]
        return jnp.sum(bias_SE * here_S[:, None].astype(bias_SE.dtype), axis=0)

    def aux_outputs(
        self, routes: Routes, dropped: jax.Array, layer: jax.Array,
        real_BL: jax.Array | None = None,
    ) -> Aux:  # fmt: skip
        """Auxiliary output of the sparse layer with index `layer` among all layers.

        Sums `[S, ...]` and a recorded choice `[B, L, S, K]` are zero in the entries of other
        layers, so that adding up the outputs of all layers collects them. `real_BL` is the mask of
        `Routes.real_BL` for the tokens of all devices along tp.
        """
        here_S = jnp.asarray(self.config.sparse_layers) == layer

        def of_layer(value: jax.Array) -> jax.Array:
            return value[None] * here_S.reshape(-1, *(1,) * value.ndim).astype(value.dtype)

        devices, shares_BLE = self.sharing.token_devices, routes.of_real(routes.shares_BLE)
        loads = devices.total((self._counts(routes.taken_BLK), shares_BLE.sum(1)))
        if devices.size > 1:
            loads = jax.tree.map(lambda load: checkpoint_name(load, LOADS), loads)
        counts_BE, shares_BE = loads
        loss = self._loss(shares_BE, counts_BE, routes)
        entropy = jax.scipy.special.entr(shares_BLE).sum()
        entropy, dropped = devices.total((entropy, dropped))
        sums = {
            "expert_counts": counts_BE.sum(0, dtype=jnp.int32),
            "expert_rows_dropped": dropped,
            "router_entropy": lax.stop_gradient(entropy),
        }
        if loss is not None:
            sums["router_loss"] = lax.stop_gradient(loss)
        rows = {}
        if self.recorded:
            choice_BLK = devices.enter(routes.choice_BLK)
            own_BLSK = choice_BLK[:, :, None] * here_S[None, None, :, None]
            rows[ROUTES] = own_BLSK.astype(jnp.int32)
        sums = {name: of_layer(value) for name, value in sums.items()}
        tokens = routes.choice_BLK[..., 0].size * devices.size
        tokens = jnp.asarray(tokens if real_BL is None else real_BL.sum(), jnp.int32)
        losses = {} if loss is None else {"router": (loss, tokens)}
        return Aux(losses, sums, per_example=rows)

    def report(self, aux: Aux) -> Mapping[str, jax.Array]:
        """Logged values of a step: loads by layer, dropped share, entropy and loss per token."""
        counts, dropped = aux.sums["expert_counts"], aux.sums["expert_rows_dropped"]
        mean = sum(_mean(counts))
        rows = jnp.maximum(mean * self.config.n_experts, 1)  # a step may be all padding
        tokens = rows / self.config.experts_per_token
        means = [name for name in ("router_entropy", "router_loss") if name in aux.sums]
        return {
            "expert_load_max": counts.max(1),
            "expert_load_mean": mean,
            # Every sparse layer routes the same tokens; the rows of all layers may exceed int32.
            "expert_dropped_share": (dropped / rows).mean(),
        } | {name: aux.sums[name] / tokens for name in means}

    def _counts(self, choice_BLK: jax.Array) -> jax.Array:
        """Count the real tokens of each example that chose each expert: `[B, E]` int32."""
        experts = jnp.arange(self.config.n_experts)
        chosen = choice_BLK[..., None] == experts[None, None, None]
        return chosen.sum((1, 2), dtype=jnp.int32)

    def _loss(self, shares_BE: jax.Array, counts_BE: jax.Array, routes: Routes) -> jax.Array | None:
        """Sum of the router losses over real tokens; None if both weights are 0.

        Every device along tp has the full sum as its value. Of its gradient each has that of its
        own tokens or, of the same tokens, 1 / tp, since gradients are summed over tp. Scores of
        padding are zeros.
        """
        config, loss = self.config, 0.0
        if config.router_aux_loss:
            loss += config.router_aux_loss * self._unevenness(shares_BE, counts_BE)
        if config.router_z_loss:
            z_BL1 = jax.nn.logsumexp(routes.logits_BLE, axis=-1, keepdims=True)
            square = self.sharing.token_devices.total(jnp.sum(routes.of_real(z_BL1 * z_BL1)))
            loss += config.router_z_loss * square
        if isinstance(loss, float):
            return None
        part = loss / self.sharing.width_devices.size
        return part + lax.stop_gradient(loss - part)

    def _unevenness(self, shares_BE: jax.Array, counts_BE: jax.Array) -> jax.Array:
        """Sum of the balancing loss over tokens, to which each token adds 1 where loads are even.

        For each sequence it is E times the sum over experts of f P: f is the expert's share of the
        tokens' choices, P its mean score share (DeepSeek-AI 2024, equations 17-20; Fedus et al.
        2021, equation 4). So it does not depend on how sequences are padded, or divided into
        microbatches and replicas.
        """
        sequence = self.sharing.sequence
        own_B1X = jnp.concatenate([counts_BE.astype(shares_BE.dtype), shares_BE], -1)[:, None]
        every_BX = sequence.gather(own_B1X).sum(1)
        if sequence.size > 1:
            every_BX = checkpoint_name(every_BX, LOADS)
        count_BE, share_BE = jnp.split(every_BX, 2, axis=-1)
        copies, count_BE = self.config.experts_per_token, lax.stop_gradient(count_BE)
        choices_B1 = jnp.maximum(count_BE.sum(-1, keepdims=True), 1)
        f_BE, tokens_B1 = count_BE / choices_B1, choices_B1 / copies
        even_B = self.config.n_experts * jnp.sum(f_BE * share_BE / tokens_B1, -1)
        return jnp.sum(counts_BE.sum(-1) / copies * even_B)


def real_tokens(rows: Mapping[str, jax.Array]) -> jax.Array | None:
    """Mask of the tokens of a microbatch that are not padding, `[B, L]`; None: all are tokens.

    Packed rows mark padding in `segments`, other rows that may end in padding in `real`.
    """
    if "segments" in rows:
        return rows["segments"] >= 0
    return rows[REAL] > 0 if REAL in rows else None


def _mean(counts_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean count of each layer's experts, `[S]` each: its integer part, and the remainder below 1.

    Dividing before the sum keeps intermediate values in int32 where the sum of counts is not.
    """
    experts = counts_SE.shape[1]
    rest_S = (counts_SE % experts).sum(1)
    return (counts_SE // experts).sum(1) + rest_S // experts, rest_S % experts / experts
