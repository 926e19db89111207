"""Attention to the last tokens and to entries that each stand for a few earlier tokens.

A device may have a shard of a sequence, or a slice of it, whose tokens read earlier ones as
`jaxpipe.model.families.deepseek_v4.earlier` brings them here. In packed rows nothing of another
document is read.

Shapes: B examples, L tokens of a device, D model, Q the latent of queries, H query heads, K head
dim, G groups of heads, O the width of a group's output, S keys of a block of queries or entries of
the sequence, E entries that a query attends to. Devices that share the layer have complete groups
of heads.

Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3, in the form of transformers'
`DeepseekV4Attention`.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.model.attention.blocks import KeyRange
from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.families.deepseek_v4.blocks import last_padding, map_query_blocks
from jaxpipe.model.families.deepseek_v4.compression import (
    CHOOSING,
    OWN,
    PLACES,
    Compressor,
    EntryTokens,
    Indexer,
    tokens_before,
)
from jaxpipe.model.families.deepseek_v4.config import Attention, DeepseekV4Config
from jaxpipe.model.families.deepseek_v4.earlier import EarlierTokens, tokens_kept
from jaxpipe.model.families.deepseek_v4.rotation import rotate_last
from jaxpipe.model.layers.parts import Init, LayerInputs, RMSNorm
from jaxpipe.model.options import LayerParts, Sharing


class EntryAttention(nnx.Module):
    """Softmax over the last tokens, the layer's entries, and one sink per head.

    All heads read one key per token or entry, which is also its value. What they mix is rotated
    back by the query's position, so that values count by distance.
    """

    NAME = "attn"
    KIND: ClassVar[Attention] = "window"

    def __init__(self, config: DeepseekV4Config, parts: LayerParts, init: Init):
        kind, d, k, heads = self.KIND, config.d_model, config.head_dim, config.n_heads
        own = parts.own(differs=parts.devices.size > 1)
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.wq_a = init("attn/wq_a", (d, config.q_lora_rank), 0.02, own)
        self.q_norm = RMSNorm("attn/q_norm", config.q_lora_rank, config.norm_eps, init, own)
        self.wq_b = init("attn/wq_b", (config.q_lora_rank, heads * k), 0.02, parts.cut(1))
        self.wkv = init("attn/wkv", (d, k), 0.02, own)
        self.kv_norm = RMSNorm("attn/kv_norm", k, config.norm_eps, init, own)
        groups, rank = config.o_groups, config.o_lora_rank
        self.wo_a = init("attn/wo_a", (heads * k // groups, groups * rank), 0.02, parts.cut(1))
        self.wo_b = init("attn/wo_b", (groups * rank, d), out_std, parts.cut(0))
        self.sinks = init("attn/sinks", (heads,), 0.0, parts.cut(0))
        self.rate = config.rate_of(kind)
        if self.rate:
            self.entries = Compressor(OWN, k, self.rate, config, init, own, overlaps=kind == "csa")
        if kind == "csa":
            self.indexer = Indexer(config, init, own)
        self.config, self.devices, self.sharing = config, parts.devices, parts.sharing

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; the positions are those of all L tokens."""
        config, dot = self.config, given.dot
        x_BLD = self.devices.enter(x_BLD)
        earlier = EarlierTokens(self.sharing, x_BLD.shape[1], given.cache)
        latent_BLQ, key_BLK = dot(x_BLD, wq_a=self.wq_a[...], wkv=self.wkv[...])
        latent_BLQ = self.q_norm(latent_BLQ)
        (q_BLX,) = dot(latent_BLQ, wq_b=self.wq_b[...])
        q_BLHK = _normalise(q_BLX.reshape(*q_BLX.shape[:2], -1, config.head_dim), config.norm_eps)
        q_BLHK = rotate_last(q_BLHK, positions_BL, config)
        key_BLK = rotate_last(self.kv_norm(key_BLK)[:, :, None], positions_BL, config)[:, :, 0]
        document_BL = None if given.documents is None else given.documents.positions
        in_text_BL = earlier.place_L[None] if document_BL is None else document_BL
        text = KeyRange.of(earlier.place_L, len(x_BLD), 0, in_text_BL)
        entries = chosen_BLE = None
        if self.rate and x_BLD.shape[1] >= self.rate:
            tokens = EntryTokens.of(self.rate, earlier, document_BL)
            entries = self.entries(x_BLD, tokens, earlier), tokens.place_BS
            if self.KIND == "csa":
                chosen_BLE = self.indexer(x_BLD, latent_BLQ, positions_BL, tokens, earlier, text)
        mixed_BLHK = self._mix(q_BLHK, key_BLK, earlier, text, entries, chosen_BLE)
        mixed_BLHK = rotate_last(mixed_BLHK, -positions_BL, config)
        mixed_BLGO = self._project_groups(mixed_BLHK)
        (made_BLD,) = dot(mixed_BLGO.reshape(*x_BLD.shape[:2], -1), wo_b=self.wo_b[...])
        cache = given.cache and given.cache._replace(parts=earlier.after)
        return self.devices.leave(made_BLD), cache

    def _project_groups(self, mixed_BLHK: jax.Array) -> jax.Array:
        """The outputs of every group of heads times the group's matrix, `[B, L, G, O]`."""
        wo_a_XY = self.wo_a[...].astype(mixed_BLHK.dtype)
        wo_a_XGO = wo_a_XY.reshape(len(wo_a_XY), -1, self.config.o_lora_rank)
        mixed_BLGX = mixed_BLHK.reshape(*mixed_BLHK.shape[:2], wo_a_XGO.shape[1], -1)
        return jnp.einsum("blgx,xgo->blgo", mixed_BLGX, wo_a_XGO)

    def _mix(
        self, q_BLHK: jax.Array, key_BLK: jax.Array, earlier: EarlierTokens, text: KeyRange,
        entries: tuple[jax.Array, jax.Array] | None, chosen_BLE: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Attention output `[B, L, H, K]`, a block of queries at a time.

        `entries` are `[B, S, K]` and their places.
        """
        length = q_BLHK.shape[1]
        before = min(self.config.sliding_window, earlier.longest) - 1
        padded_BSK = earlier.with_tokens_before("keys", key_BLK, before)
        padded_BSK = jnp.pad(padded_BSK, ((0, 0), (0, last_padding(length)), (0, 0)))

        def mix(index_L: jax.Array, text: KeyRange, q_BLHK: jax.Array, *chosen: Any) -> jax.Array:
            count = before + len(index_L)
            keys_BSK = jax.lax.dynamic_slice_in_dim(padded_BSK, index_L[0], count, axis=1)
            place_S = earlier.place_L[0] + index_L[0] - before + jnp.arange(count)
            last = text._replace(first_BL=jnp.maximum(text.first_BL, text.own_BL - before))
            parts = [(keys_BSK, last.mask(place_S[None])[:, 0])]
            if chosen:
                (chosen_BLE,) = chosen
                rows = jnp.arange(len(q_BLHK))[:, None, None]
                entry_BLEK = entries[0][rows, jnp.maximum(chosen_BLE, 0)]
                parts.append((entry_BLEK, chosen_BLE >= 0))
            elif entries is not None:
                entry_BSK, place_BS = entries
                parts.append((entry_BSK, text.mask(place_BS)[:, 0]))
            return _attend(q_BLHK, parts, self.sinks[...])

        return map_query_blocks(mix, text, q_BLHK, *(() if chosen_BLE is None else (chosen_BLE,)))


class ChosenEntryAttention(EntryAttention):
    """Attention also to the entries of few tokens that an indexer chooses (CSA)."""

    KIND = "csa"


class AllEntryAttention(EntryAttention):
    """Attention also to all entries of many tokens (HCA)."""

    KIND = "hca"


MIXERS: dict[Attention, type[EntryAttention]] = {
    mixer.KIND: mixer for mixer in (EntryAttention, ChosenEntryAttention, AllEntryAttention)
}


def empty_state(
    config: DeepseekV4Config, kind: Attention, x: jax.Array, length: int, sharing: Sharing, *,
    documents: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """What the tokens of a first slice read of earlier ones, by name.

    Args:
      config: sizes of the model.
      kind: attention of the layer.
      x: an array of the batch and the dtype, `[B, ...]`.
      length: tokens of a device's shard of a slice.
      sharing: the devices that share the sequence, and the number of slices.
      documents: whether rows are packed.
    """
    of_sequence = length * sharing.sequence.size * sharing.slices
    keys = tokens_kept(min(config.sliding_window, of_sequence) - 1, sharing, length)
    shapes: dict[str, tuple[int, ...]] = {"keys": (keys, config.head_dim)} if keys else {}
    rate, overlaps = config.rate_of(kind), kind == "csa"
    widths = {OWN: config.head_dim} if rate else {}
    if kind == "csa":
        widths[CHOOSING] = config.index_head_dim
    before = tokens_before(rate, overlaps=overlaps, documents=documents) if rate else 0
    for name, width in widths.items():
        shapes[name] = of_sequence // rate, width
        if before:
            columns = 2 * width * (2 if overlaps else 1)
            shapes[f"{name}/tokens"] = tokens_kept(before, sharing, length), columns
    state = {name: jnp.zeros((len(x), *shape), x.dtype) for name, shape in shapes.items()}
    if rate and documents:
        state[PLACES] = jnp.zeros((len(x), of_sequence // rate), jnp.int32)
    return state


def _attend(
    q_BLHK: jax.Array, parts: list[tuple[jax.Array, jax.Array]], sink_H: jax.Array
) -> jax.Array:
    """Attention to the keys of several parts at once, `[B, L, H, K]`.

    Args:
      q_BLHK: queries.
      parts: keys, which are also values, `[B, S, K]` or those of each query `[B, L, S, K]`; and
        which of them each query attends to, `[1 or B, L, S]`.
      sink_H: scores of one more key per head, whose value is 0.
    """
    wide = jnp.promote_types(q_BLHK.dtype, jnp.float32)
    forms = ["blsk" if keys.ndim == 4 else "bsk" for keys, _ in parts]
    scores = [
        jnp.where(
            seen_BLS[:, :, None],
            jnp.einsum(f"blhk,{form}->blhs", q_BLHK, keys, preferred_element_type=wide)
            * q_BLHK.shape[-1] ** -0.5,
            jnp.finfo(wide).min,
        )
        for (keys, seen_BLS), form in zip(parts, forms)
    ]
    sink_BLH1 = jnp.broadcast_to(sink_H.astype(wide)[None, None, :, None], (*q_BLHK.shape[:3], 1))
    share_BLHS = jax.nn.softmax(jnp.concatenate([*scores, sink_BLH1], axis=-1), axis=-1)
    mixed, begin = 0, 0
    for (keys, _), form in zip(parts, forms):
        end = begin + keys.shape[-2]
        own = share_BLHS[..., begin:end].astype(keys.dtype)
        mixed += jnp.einsum(f"blhs,{form}->blhk", own, keys)
        begin = end
    return mixed


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last dim."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps).astype(x.dtype)
