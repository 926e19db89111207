"""The router: which experts a token goes to, and with which weights.

Shapes: B examples, L tokens, D model, E routed experts, K experts per token. Everything is computed
in float32 (or wider, if the input is). F makes the choice once and stores it for B and W.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.parts import Init, broadcast_last
from jaxpipe.model.options import LayerParts

CHOICE = "experts"  # checkpoint name of the chosen indices, which F always stores


class Routes(NamedTuple):
    """Where tokens go.

    Attributes:
      choice_BLK: indices of K different experts.
      weights_BLK: their weights.
      logits_BLE: router logits, which the z-loss reads.
      shares_BLE: scores normalised to a sum of 1, which the balancing loss reads.
      real_BL: mask of the tokens that are not padding; None: all are tokens.
    """

    choice_BLK: jax.Array
    weights_BLK: jax.Array
    logits_BLE: jax.Array
    shares_BLE: jax.Array
    real_BL: jax.Array | None = None

    @property
    def taken_BLK(self) -> jax.Array:
        """The choice of real tokens, and E, which is no expert, at padding."""
        return self.of_real(self.choice_BLK, self.shares_BLE.shape[-1])

    def of_real(self, values_BLX: jax.Array, otherwise: int = 0) -> jax.Array:
        """Values at real tokens, and `otherwise` at padding."""
        if self.real_BL is None:
            return values_BLX
        return jnp.where(self.real_BL[..., None], values_BLX, otherwise)


class Router(nnx.Module):
    """A linear map from tokens to scores, and the choice of the highest scores.

    With `softmax` scores are normalised over all experts (Qwen3-MoE); with `sigmoid` (DeepSeek-AI
    2024, "DeepSeek-V3", section 2.1.2) and `sqrtsoftplus` (DeepSeek-V4) each is independent. A bias
    enters the choice alone, not the weights (Wang et al. 2024). With groups a token chooses within
    the groups whose best scores have the largest sum: two in DeepSeek-V3, one in DeepSeek-V2.
    """

    def __init__(self, config: MixtureConfig, parts: LayerParts, init: Init):
        leaf = parts.own(differs=parts.devices.size > 1)
        self.gate = init("router/gate", (config.d_model, config.n_experts), 0.02, leaf)
        if config.VARIANT.has_expert_biases:
            self.bias = init("router/bias", (config.n_experts,), 0.0, leaf)
        self.config = config

    def __call__(
        self, x_BLD: jax.Array, bias_E: jax.Array | None, given_BLK: jax.Array | None = None
    ) -> Routes:
        """Route tokens `[B, L, D]`; `given_BLK` replaces the choice, weighted by live scores."""
        config, wide = self.config, jnp.promote_types(x_BLD.dtype, jnp.float32)
        logits_BLE = x_BLD.astype(wide) @ self.gate[...].astype(wide)
        if config.VARIANT.has_expert_biases:
            logits_BLE += broadcast_last(self.bias[...], logits_BLE)
        scores_BLE = _SCORES[config.router_score](logits_BLE)
        is_share = config.router_score == "softmax"
        shares_BLE = scores_BLE if is_share else _normalise(scores_BLE)
        choice_BLK = given_BLK
        if choice_BLK is None:
            choice_BLK = checkpoint_name(choose(scores_BLE, bias_E, config), CHOICE)
        weights_BLK = _select(scores_BLE, choice_BLK)
        if config.norm_topk_prob:
            weights_BLK = _normalise(weights_BLK)
        return Routes(choice_BLK, config.router_scale * weights_BLK, logits_BLE, shares_BLE)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    """sqrt(log(1 + exp(x))), with a gradient of 0, not infinity, where it underflows to 0."""
    score = jax.nn.softplus(logits)
    return jnp.where(score > 0, jnp.sqrt(jnp.where(score > 0, score, 1)), 0)


_SCORES = {  # by `model.router_score`
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _select(scores_BLE: jax.Array, choice_BLK: jax.Array) -> jax.Array:
    """Scores of the chosen experts, by a mask, because the gradient of a gather is a scatter."""
    chosen_BLKE = jax.nn.one_hot(choice_BLK, scores_BLE.shape[-1], dtype=bool)
    return jnp.where(chosen_BLKE, scores_BLE[:, :, None], 0).sum(-1)


def _normalise(scores: jax.Array) -> jax.Array:
    """scores / (their sum over the last dim + 1e-20), finite also where every score underflows.

    The bias or the groups may choose experts whose scores are all 0 in float32. The term 1e-20 is
    that of DeepSeek-V3's released gate. The factor is a power of two, so it changes no bit of the
    result; without it the gradient would divide by the square of 1e-20, which is 0 in float32.
    """
    factor = 2.0**40
    scaled = factor * scores
    return scaled / (scaled.sum(-1, keepdims=True) + factor * 1e-20)


def choose(scores_BLE: jax.Array, bias_E: jax.Array | None, config: MixtureConfig) -> jax.Array:
    """Choose each token's K experts: indices `[B, L, K]` int32, the highest score first."""
    scores_BLE = lax.stop_gradient(scores_BLE)
    if bias_E is not None:
        scores_BLE += bias_E.astype(scores_BLE.dtype)[None, None]
    if config.groups_per_token < config.expert_groups:
        scores_BLE = _mask_groups(scores_BLE, config)
    return lax.top_k(scores_BLE, config.experts_per_token)[1]


def _mask_groups(scores_BLE: jax.Array, config: MixtureConfig) -> jax.Array:
    """Scores of experts in a token's best groups, and minus infinity elsewhere."""
    groups = config.expert_groups
    grouped = scores_BLE.reshape(*scores_BLE.shape[:-1], groups, -1)
    counted = min(config.group_score_experts, grouped.shape[-1])
    best = lax.top_k(grouped, counted)[0].sum(-1)
    kept = lax.top_k(best, config.groups_per_token)[1]
    chosen = jax.nn.one_hot(kept, groups, dtype=bool).any(-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores_BLE.shape)
