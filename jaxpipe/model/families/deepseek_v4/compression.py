"""Entries that each stand for a few tokens, and the indexer that chooses some for every query.

The entries of a text begin with its first token; tokens at its end that do not fill an entry have
none. In packed rows every document is a text of its own.

Shapes: B examples, L tokens of a device, N tokens before them, T entries that end among its tokens,
S entries of the sequence, R tokens per entry, D model, Q the latent of queries, K the width of an
entry, E entries that a query attends to, I heads of the indexer, X columns of a product.

Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3, in the form of transformers'
`DeepseekV4CSACompressor` and `DeepseekV4HCACompressor`.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.attention.blocks import KeyRange
from jaxpipe.model.attention.indexed import IndexQueries, choose_keys
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.deepseek_v4.earlier import EarlierTokens
from jaxpipe.model.families.deepseek_v4.rotation import rotate_last
from jaxpipe.model.layers.parts import Init, RMSNorm

CHOSEN = "entries"  # checkpoint name of the chosen entries, which F always stores
# Names of a layer's entries, of those of its indexer, and in the state of slices of their places.
OWN, CHOOSING, PLACES = "attn/entries", "indexer/entries", "places"


class EntryTokens(NamedTuple):
    """Which tokens of a device its entries are made of.

    Attributes:
      rate: R, the number of tokens per entry.
      position_BT: positions of their first tokens in their texts.
      place_BS: places in the sequence of the last tokens of all entries; -1: there is no entry.
      last_BT: index of their last tokens among the device's; None: its tokens divide into them.
    """

    rate: int
    position_BT: jax.Array
    place_BS: jax.Array
    last_BT: jax.Array | None = None

    @classmethod
    def of(cls, rate: int, earlier: EarlierTokens, position_BL: jax.Array | None) -> Self:
        """Build it from the tokens' positions in their documents; None: a row is one text.

        Raises:
          ValueError: entries would have tokens of several shards of one text.
        """
        length = earlier.length
        if length < earlier.longest and length % rate:
            raise ValueError(
                f"{length} tokens of a shard or slice do not divide into entries of {rate} tokens."
            )
        count = length // rate
        if position_BL is None:
            last_1S = jnp.arange(earlier.longest // rate)[None] * rate + rate - 1
            position_1T = earlier.place_L[None, : count * rate : rate]
            return cls(rate, position_1T, last_1S)
        # Ends of entries are R tokens apart or more, so that no more than L / R are in the shard.
        ends_BL = (position_BL + 1) % rate == 0
        find = jax.vmap(lambda ends_L: jnp.nonzero(ends_L, size=count, fill_value=-1)[0])
        last_BT = find(ends_BL)
        is_none_BT, last_BT = last_BT < 0, jnp.maximum(last_BT, 0)
        # A place of 0 is nothing: buffers of slices begin as zeros.
        place_BT = jnp.where(is_none_BT, 0, earlier.place_L[last_BT] + 1)
        place_BS = earlier.with_entries_before(PLACES, place_BT.astype(jnp.int32)) - 1
        position_BT = jnp.take_along_axis(position_BL, last_BT, axis=1) - rate + 1
        return cls(rate, position_BT, place_BS, last_BT)

    def read(self, x_BSX: jax.Array, before: int, back: int) -> jax.Array:
        """x of every entry's tokens, or of those `back` tokens before each, `[B, T, R, X]`.

        Args:
          x_BSX: x of the device's tokens and of `before` tokens before them.
          before: N.
          back: a number of tokens.
        """
        batch, count, rate = x_BSX.shape[0], self.position_BT.shape[1], self.rate
        begin = before - back
        if self.last_BT is None:
            own = x_BSX[:, begin : begin + count * rate]
            return own.reshape(batch, count, rate, -1)
        index_BTR = begin + self.last_BT[..., None] + jnp.arange(1 - rate, 1)[None, None]
        return x_BSX[jnp.arange(batch)[:, None, None], jnp.maximum(index_BTR, 0)]


def tokens_before(rate: int, *, overlaps: bool, documents: bool) -> int:
    """Number of tokens before a device's own that its entries may have.

    In packed rows an entry may begin on the device before.
    """
    return rate * overlaps + (rate - 1) * documents


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
        self.config, self.name, self.overlaps = config, name, overlaps

    def __call__(self, x_BLD: jax.Array, tokens: EntryTokens, earlier: EarlierTokens) -> jax.Array:
        """Rotated entries of all devices and slices, `[B, S, K]`."""
        wide, rate = jnp.promote_types(x_BLD.dtype, jnp.float32), tokens.rate
        before = tokens_before(rate, overlaps=self.overlaps, documents=tokens.last_BT is not None)
        both_BLX = jnp.concatenate(
            [x_BLD @ weight[...].astype(x_BLD.dtype) for weight in (self.wkv, self.wgate)], axis=-1
        )
        both_BSX = earlier.with_tokens_before(f"{self.name}/tokens", both_BLX, before)

        def read(x_BSX: jax.Array) -> jax.Array:
            if not self.overlaps:
                return tokens.read(x_BSX, before, 0)
            first, second = jnp.split(x_BSX, 2, axis=-1)
            parts = tokens.read(first, before, rate), tokens.read(second, before, 0)
            return jnp.concatenate(parts, axis=2)

        value, gate = map(read, jnp.split(both_BSX, 2, axis=-1))
        bias_RX = self.bias[...].astype(wide)
        if self.overlaps:
            bias_RX = jnp.concatenate(jnp.split(bias_RX, 2, axis=-1))
        gate = gate.astype(wide) + bias_RX[None, None]
        if self.overlaps:
            is_first_BT = tokens.position_BT < rate
            is_before_R = (jnp.arange(2 * rate) < rate)[None, None, :, None]
            gate = jnp.where(is_first_BT[..., None, None] & is_before_R, -jnp.inf, gate)
        share_BTRK = jax.nn.softmax(gate, axis=2).astype(value.dtype)
        entry_BTK = self.norm((value * share_BTRK).sum(2))
        entry_BTK = rotate_last(entry_BTK[:, :, None], tokens.position_BT, self.config)[:, :, 0]
        return earlier.with_entries_before(self.name, entry_BTK)


class Indexer(nnx.Module):
    """Chooses the entries that each query attends to, by scores of its own narrow entries.

    A choice has no gradient, so these parameters are frozen.
    """

    def __init__(self, config: DeepseekV4Config, init: Init, leaf: ParamSpec):
        frozen = replace(leaf, trained=False)
        heads, width = config.index_n_heads, config.index_head_dim
        self.entries = Compressor(
            CHOOSING, width, config.csa_rate, config, init, frozen, overlaps=True
        )
        self.wq = init("indexer/wq", (config.q_lora_rank, heads * width), 0.02, frozen)
        self.weights = init("indexer/weights", (config.d_model, heads), 0.02, frozen)
        self.config = config

    def __call__(
        self, x_BLD: jax.Array, latent_BLQ: jax.Array, positions_BL: jax.Array,
        tokens: EntryTokens, earlier: EarlierTokens, text: KeyRange,
    ) -> jax.Array:  # fmt: skip
        """Indices of the chosen entries `[B, L, E]` int32; -1 stands for none.

        `text` has the places of each query's text up to itself.
        """
        config = self.config
        x_BLD, latent_BLQ = jax.lax.stop_gradient((x_BLD, latent_BLQ))
        entry_BSK = self.entries(x_BLD, tokens, earlier)
        q_BLX = latent_BLQ @ self.wq[...].astype(x_BLD.dtype)
        q_BLIK = q_BLX.reshape(*q_BLX.shape[:2], -1, config.index_head_dim)
        q_BLIK = rotate_last(q_BLIK, positions_BL, config)
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        weight_BLI = (x_BLD @ self.weights[...].astype(x_BLD.dtype)).astype(wide)
        index = IndexQueries(q_BLIK, weight_BLI * config.index_n_heads**-0.5)
        chosen_BLE = choose_keys(index, entry_BSK, text, config.index_topk, tokens.place_BS)
        return checkpoint_name(jax.lax.stop_gradient(chosen_BLE), CHOSEN)
