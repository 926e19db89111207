"""Entries that each stand for a few tokens, and the indexer that chooses some for every query.

Shapes: B examples, L tokens, T entries, R tokens per entry, D model, Q the latent of queries, K the
width of an entry, E entries that a query attends to, I heads of the indexer.

Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3, in the form of transformers'
`DeepseekV4CSACompressor` and `DeepseekV4HCACompressor`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.families.deepseek_v4.blocks import map_query_blocks
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.deepseek_v4.rotation import rotate_last
from jaxpipe.model.layers.parts import Init, RMSNorm

CHOSEN = "entries"  # checkpoint name of the chosen entries, which F always stores


class Compressor(nnx.Module):
    """Makes an entry of every `rate` tokens: a gated mean of one projection of each token.

    With `overlaps` tokens have two projections, and an entry is the mean of the second of its own
    tokens and the first of the `rate` tokens before them.
    """

    def __init__(
        self, name: str, width: int, rate: int, config: DeepseekV4Config, init: Init,
        leaf: ParamSpec, *, overlaps: bool,
    ):  # fmt: skip
        d, columns = config.d_model, width * (2 if overlaps else 1)
        self.wkv = init(f"{name}/wkv", (d, columns), 0.02, leaf)
        self.wgate = init(f"{name}/wgate", (d, columns), 0.02, leaf)
        self.bias = init(f"{name}/bias", (rate, columns), 0.0, leaf)
        self.norm = RMSNorm(f"{name}/norm", width, config.norm_eps, init, leaf)
        self.config, self.rate, self.overlaps = config, rate, overlaps

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Rotated entries `[B, T, K]` of all full groups of tokens."""
        batch, count, rate = x_BLD.shape[0], x_BLD.shape[1] // self.rate, self.rate
        x_BLD = x_BLD[:, : count * rate]
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        value, gate = (
            (x_BLD @ weight[...].astype(x_BLD.dtype)).reshape(batch, count, rate, -1)
            for weight in (self.wkv, self.wgate)
        )
        gate = gate.astype(wide) + self.bias[...].astype(wide)[None, None]
        if self.overlaps:
            value, gate = _with_tokens_before(value, 0), _with_tokens_before(gate, -jnp.inf)
        share_BTRK = jax.nn.softmax(gate, axis=2).astype(value.dtype)
        entry_BTK = self.norm((value * share_BTRK).sum(2))
        place_BT = jnp.broadcast_to(jnp.arange(count) * rate, (batch, count))
        return rotate_last(entry_BTK[:, :, None], place_BT, self.config)[:, :, 0]


def _with_tokens_before(x_BTRX: jax.Array, nothing: float) -> jax.Array:
    """`[B, T, R, 2 K] -> [B, T, 2 R, K]`: of the entry before the first K, of its own the last K.

    `nothing` stands before the first entry.
    """
    before, own = jnp.split(x_BTRX, 2, axis=-1)
    before = jnp.pad(before[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=nothing)
    return jnp.concatenate([before, own], axis=2)


def ready_entries(place_L: jax.Array, rate: int) -> jax.Array:
    """Number of entries whose tokens are all at or before each of these places."""
    return (place_L + 1) // rate


class Indexer(nnx.Module):
    """Chooses the entries that each query attends to, by scores of its own narrow entries.

    The score of an entry is the weighted sum over heads of relu(query . entry). A choice has no
    gradient, so these parameters are frozen.
    """

    def __init__(self, config: DeepseekV4Config, init: Init, leaf: ParamSpec):
        frozen = replace(leaf, trained=False)
        heads, width = config.index_n_heads, config.index_head_dim
        self.entries = Compressor(
            "indexer/entries", width, config.csa_rate, config, init, frozen, overlaps=True
        )
        self.wq = init("indexer/wq", (config.q_lora_rank, heads * width), 0.02, frozen)
        self.weights = init("indexer/weights", (config.d_model, heads), 0.02, frozen)
        self.config = config

    def __call__(
        self, x_BLD: jax.Array, latent_BLQ: jax.Array, positions_BL: jax.Array
    ) -> jax.Array:
        """Indices of the chosen entries `[B, L, E]` int32; -1 stands for none."""
        config = self.config
        x_BLD, latent_BLQ = jax.lax.stop_gradient((x_BLD, latent_BLQ))
        entry_BTK = self.entries(x_BLD)
        q_BLX = latent_BLQ @ self.wq[...].astype(x_BLD.dtype)
        q_BLIK = q_BLX.reshape(*q_BLX.shape[:2], -1, config.index_head_dim)
        q_BLIK = rotate_last(q_BLIK, positions_BL, config)
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        weight_BLI = (x_BLD @ self.weights[...].astype(x_BLD.dtype)).astype(wide)
        weight_BLI *= (config.index_n_heads * config.index_head_dim) ** -0.5
        count = min(config.index_topk, entry_BTK.shape[1])

        def choose(place_L: jax.Array, q_BLIK: jax.Array, weight_BLI: jax.Array) -> jax.Array:
            product_BLIT = jnp.einsum(
                "blik,btk->blit", q_BLIK, entry_BTK, preferred_element_type=wide
            )
            score_BLT = jnp.einsum("blit,bli->blt", jax.nn.relu(product_BLIT), weight_BLI)
            ready_L1 = ready_entries(place_L, config.csa_rate)[:, None]
            is_ready_LT = jnp.arange(entry_BTK.shape[1])[None] < ready_L1
            score_BLT = jnp.where(is_ready_LT[None], score_BLT, -jnp.inf)
            chosen_BLE = jax.lax.top_k(score_BLT, count)[1]
            return jnp.where(chosen_BLE < ready_L1[None], chosen_BLE, -1)

        chosen_BLE = map_query_blocks(choose, q_BLIK, weight_BLI)
        return checkpoint_name(jax.lax.stop_gradient(chosen_BLE), CHOSEN)
