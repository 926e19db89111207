"""Causal softmax attention with grouped key/value heads.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, R = H / G, K head dim; M =
R * L rows, the queries of all heads that read the same keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import Aux, LayerOutput
from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence, query_blocks
from jaxpipe.model.attention.blocks import BlockKernel, KeyRange, PlainBlocks, count_halvings
from jaxpipe.model.attention.ring import RingLayout, ring_attention, slice_positions
from jaxpipe.model.kernels.cudnn_attention import FusedBlocks, fused_attention
from jaxpipe.model.kernels.cudnn_packed import RowDocuments, packed_attention, shard_documents

# Maps attention probabilities `[B, H, L, S]` from the `query`-th query and `key`-th key; or None.
OnShares = Callable[..., jax.Array] | None
# Makes keys and values of the two arrays that a layer passes in their place, of any tokens.
Expand = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class CachedKeys(NamedTuple):
    """Keys and values of a sequence's tokens so far, or what they are made of, with slices.

    Attributes:
      keys_BSGK, values_BSGK: buffers for all S tokens; what comes after the tokens so far is not
        read.
      begin: number of the sequence's tokens in earlier slices.
    """

    keys_BSGK: jax.Array
    values_BSGK: jax.Array
    begin: jax.Array | int


def append_cache(y: jax.Array, past: CachedKeys | None, aux: Aux = Aux()) -> LayerOutput:  # noqa: B008
    """Return y, the keys and values up to the end of the slice (if there are slices) and `aux`."""
    return LayerOutput(y, past and (past.keys_BSGK, past.values_BSGK), aux)


@dataclass(frozen=True)
class CausalAttention:
    """Causal attention as a layer calls it: which keys a query attends to, and the kernel.

    Attributes:
      sequence: how attention reaches the tokens on other devices (context parallelism).
      kernel: "xla" for plain matrix products, "cudnn" for cuDNN's fused kernel.
      window: number of last tokens that a query attends to, its own included; 0: all.
      documents: most documents in a packed row; 0: a row is one text.
    """

    sequence: FullSequence = FULL_SEQUENCE
    kernel: Literal["xla", "cudnn"] = "xla"
    window: int = 0
    documents: int = 0

    def __call__(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array,
        past: CachedKeys | None = None,
        on_shares: OnShares = None, documents: RowDocuments | None = None,
        sink_H: jax.Array | None = None, expand: Expand | None = None, by_block: bool = True,
    ) -> tuple[jax.Array, CachedKeys | None]:  # fmt: skip
        """Return the attention output `[B, L, H, K]` and, with slices, the updated `past`.

        Args:
          q_BLHK, k_BLGK, v_BLGK: of the L tokens of this device's sequence shard, or of its shard
            of the current slice. Values, and the output, may be narrower than keys.
          past: keys and values of earlier slices; None without slices.
          on_shares: `OnShares`, which only the plain kernel calls.
          documents: of packed rows, where a query attends only to its own document; else None.
          sink_H: score of one more key of each head, whose value is 0 (an attention sink), or None.
          expand: makes keys and values of what `k_BLGK` and `v_BLGK` then are, such as latents;
            None: they are keys and values. These are all-gathered, cached and sent round a ring in
            place of keys and values. Where devices exchange heads, it is called first: latents have
            no heads.
          by_block: whether `expand` may be called for each block of keys, whose gradients at what
            it closes over are added.

        Raises:
          ValueError: cuDNN's kernel cannot have sinks, because it would need a mask.
        """
        sequence = self.sequence
        if expand is not None and sequence.exchanges_heads:
            (k_BLGK, v_BLGK), expand = expand(k_BLGK, v_BLGK), None
        q_BLHK, k_BLGK, v_BLGK = map(sequence.to_heads, (q_BLHK, k_BLGK, v_BLGK))
        if documents is not None:
            documents = jax.tree.map(sequence.gather_group, documents)
        if sink_H is not None:  # as one token of each neighbour, of which the first has the sinks
            sink_H = sequence.to_heads(sink_H[None, None, :, None])[0, 0, :, 0]
        exchanged = replace(self, sequence=sequence.after_exchange)
        both = k_BLGK, v_BLGK
        if self.gathers:
            both = tuple(map(sequence.gather, both))
        tokens = both[0].shape[1]
        if past is not None:
            begin = past.begin // sequence.ring
            both = tuple(_write(buffer, own, begin) for buffer, own in zip(past[:2], both))
            past = CachedKeys(*both, past.begin)
        if expand is not None and not by_block:
            both, expand = expand(*both), None
        width = (both if expand is None else jax.eval_shape(expand, *both))[1].shape[-1]
        if self.kernel == "cudnn" and width < q_BLHK.shape[-1]:
            expand = partial(_expand_wide, expand)
        given = q_BLHK, both, expand, tokens
        mixed_BLHK = exchanged._attend_locally(*given, past, on_shares, documents, sink_H)
        return sequence.to_tokens(mixed_BLHK[..., :width]), past

    def _attend_locally(
        self, q_BLHK: jax.Array, both: tuple[jax.Array, jax.Array], expand: Expand | None,
        tokens: int, past: CachedKeys | None, on_shares: OnShares, documents: RowDocuments | None,
        sink_H: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Attend with this device's heads; keys are local, all-gathered, or go round a ring.

        `tokens` of the S keys are those of the current slice.
        """
        sequence, length, begin, slice_begin = self.sequence, q_BLHK.shape[1], 0, 0
        if past is not None:
            begin, slice_begin = past.begin, past.begin // sequence.ring
        position_BL = None if documents is None else documents.positions
        place_L = begin + slice_positions(sequence, length)
        needs_blocks = self._needs_blocks(tokens, length, past, documents, sink_H is not None)
        if needs_blocks and not on_shares:
            key_range = KeyRange.of(place_L, len(q_BLHK), self.window, position_BL)
            of_keys, weights = FULL_SEQUENCE if self.gathers else sequence, ()
            if expand is not None:
                block = (x[:, :tokens] for x in both)
                expand, weights = jax.closure_convert(expand, *block)
            layout = RingLayout(of_keys, tokens, self._blocks(length), expand)
            slice_begin = jnp.asarray(slice_begin, jnp.int32)
            operands = q_BLHK, *both, key_range, slice_begin, sink_H, tuple(weights)
            return ring_attention(layout, *operands)
        k_BSGK, v_BSGK = both if expand is None else expand(*both)
        if self.kernel == "cudnn" and documents is not None:
            first = jnp.asarray(begin + sequence.start(length), jnp.int32)
            own_documents = shard_documents(documents, first, self.documents)
            of_keys = *own_documents, first, self.window, sink_H
            return packed_attention(q_BLHK, k_BSGK, v_BSGK, *of_keys)
        mask_B1LS = None
        if self.gathers or past is not None:
            mask_B1LS = _attention_mask(
                place_L, jnp.arange(k_BSGK.shape[1]), self.window, position_BL
            )
        if self.kernel == "cudnn":
            if sink_H is not None:
                raise ValueError(
                    "attention sinks with cuDNN's kernel where keys are gathered, or of earlier "
                    "slices and a window: set model.attention=xla."
                )
            return fused_attention(q_BLHK, k_BSGK, v_BSGK, mask_B1LS, self.window)
        if mask_B1LS is None:
            return causal_attention(
                q_BLHK, k_BSGK, v_BSGK, self.window, on_shares, position_BL, sink_H
            )
        return grouped_attention(q_BLHK, k_BSGK, v_BSGK, mask_B1LS, on_shares, sink_H)

    @property
    def gathers(self) -> bool:
        """Whether queries attend to keys that are all-gathered from the other devices."""
        return self.sequence.size > 1 and not self.sequence.heads

    def _needs_blocks(
        self, tokens: int, length: int, past: CachedKeys | None, documents: RowDocuments | None,
        has_sinks: bool,
    ) -> bool:  # fmt: skip
        """Whether attention runs block by block: in a ring, over slices, and over exchanged heads.

        Slices of one token, as in generation, do not: their scores are few, and blocks as many.
        cuDNN's kernel masks no block. It computes slices in blocks if this device has all tokens of
        a slice and there are neither documents nor a window; without slices it takes all tokens in
        one call, as one block where sinks follow it.
        """
        if self.sequence.ring > 1:
            return True
        if self.kernel == "cudnn":
            whole = tokens == length and documents is None
            return whole and (has_sinks if past is None else not self.window)
        return (past is not None and length > 1) or bool(self.sequence.heads)

    def _blocks(self, length: int) -> BlockKernel:
        """The kernel that computes blocks of `length` queries."""
        return (
            FusedBlocks(self.window)
            if self.kernel == "cudnn"
            else PlainBlocks(count_halvings(length))
        )


def _expand_wide(
    expand: Expand | None, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys, and values padded to their width.

    jax's function takes only values as wide as keys, its primitives others with cuDNN 9.10 or
    later.
    """
    if expand is not None:
        k_BSGK, v_BSGK = expand(k_BSGK, v_BSGK)
    more = k_BSGK.shape[-1] - v_BSGK.shape[-1]
    return k_BSGK, jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, more)])


def _write(whole_BSGK: jax.Array, own_BLGK: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole_BSGK, own_BLGK, begin, axis=1)


def _attention_mask(
    query_L: jax.Array, token_S: jax.Array, window: int, position_BL: jax.Array | None
) -> jax.Array:
    """Mask of the tokens that each query attends to, `[1 or B, 1, L, S]`.

    A document is contiguous: a query at position p of its document attends to itself and the p
    tokens before it, in whichever slice or sequence shard they are. So keys need no segment
    numbers.
    """
    back_LS = query_L[:, None] - token_S[None]
    seen_LS = back_LS >= 0
    if window:
        seen_LS &= back_LS < window
    if position_BL is None:
        return seen_LS[None, None]
    return (seen_LS[None] & (back_LS[None] <= position_BL[..., None]))[:, None]


def causal_attention(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, window: int = 0,
    on_shares: OnShares = None, position_BL: jax.Array | None = None,
    sink_H: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of every token to itself and all tokens before it, `[B, L, H, K]`.

    With a window it attends to the last `window` tokens, itself included, as in transformers'
    `masking_utils.py` (Beltagy et al. 2020; Jiang et al. 2023). For packed rows `position_BL` has
    each token's position in its document, before which it attends to nothing.

    A block of queries reads no keys after its last query, nor before the window of its first, so
    with two blocks at most three quarters of the scores are computed and stored.
    """
    length = q_BLHK.shape[1]
    rows = length // query_blocks(length)

    def block(begin: int, end: int) -> jax.Array:
        first = max(begin - window + 1, 0) if window else 0
        own, keys = slice(begin, end), slice(first, end)
        position = None if position_BL is None else position_BL[:, own]
        return grouped_attention(
            q_BLHK[:, own], k_BLGK[:, keys], v_BLGK[:, keys],
            _attention_mask(jnp.arange(begin, end), jnp.arange(first, end), window, position),
            on_shares and partial(on_shares, query=begin, key=first),
            sink_H,
        )  # fmt: skip

    return jnp.concatenate([block(i, i + rows) for i in range(0, length, rows)], axis=1)


def grouped_attention(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_B1LS: jax.Array,
    on_shares: OnShares = None, sink_H: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """softmax(q k^T / sqrt(K)) v where the mask is true, `[B, L, H, K]`.

    `sink_H` is the score of one more key of each head, whose value is 0.

    Ainslie et al. 2023 (grouped queries). `jax.nn.dot_product_attention` computes float64 scores in
    float32, and makes XLA on CPU transpose scores or probabilities six times per layer. Here they
    stay `[B, G, M, S]` in both products and their gradients, and only q, k, v and the output are
    transposed, which is K / S as much data. Scores and softmax are float32, or wider if q is.
    float16 inputs are computed in float32 throughout, because XLA on CPU has no float16 products.
    """
    b, length, h, k = q_BLHK.shape
    keys, g = k_BSGK.shape[1:3]
    dtype, wide = q_BLHK.dtype, jnp.promote_types(q_BLHK.dtype, jnp.float32)
    if dtype == jnp.float16:
        q_BLHK, k_BSGK, v_BSGK = (a.astype(wide) for a in (q_BLHK, k_BSGK, v_BSGK))
    q_BGRLK = q_BLHK.reshape(b, length, g, h // g, k).transpose(0, 2, 3, 1, 4)
    q_BGMK = q_BGRLK.reshape(b, g, -1, k)
    k_BGSK, v_BGSK = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    score_BGMS = jnp.einsum("bgmk,bgsk->bgms", q_BGMK, k_BGSK, preferred_element_type=wide)
    score_BGRLS = score_BGMS.reshape(b, g, -1, length, keys) * k**-0.5
    score_BGRLS = jnp.where(mask_B1LS[:, :, None], score_BGRLS, jnp.finfo(wide).min)
    if sink_H is None:
        share_BGMS = jax.nn.softmax(score_BGRLS.reshape(score_BGMS.shape), axis=-1)
    else:
        share_BGRLS = _softmax_with_sinks(score_BGRLS, sink_H.reshape(1, g, -1, 1, 1).astype(wide))
        share_BGMS = share_BGRLS.reshape(score_BGMS.shape)
    if on_shares is not None:
        share_BGMS = on_shares(share_BGMS.reshape(b, h, length, keys)).reshape(score_BGMS.shape)
    mixed_BGMK = jnp.einsum("bgms,bgsk->bgmk", share_BGMS.astype(v_BGSK.dtype), v_BGSK)
    mixed_BLGRK = mixed_BGMK.reshape(*q_BGRLK.shape[:-1], -1).transpose(0, 3, 1, 2, 4)
    return mixed_BLGRK.reshape(b, length, h, -1).astype(dtype)


def _softmax_with_sinks(score_BGRLS: jax.Array, sink_1GR11: jax.Array) -> jax.Array:
    """Softmax over the scores of a query and its sink, without the share of the sink."""
    top_BGRL1 = jnp.maximum(score_BGRLS.max(-1, keepdims=True), sink_1GR11)
    top_BGRL1 = jax.lax.stop_gradient(top_BGRL1)
    share_BGRLS = jnp.exp(score_BGRLS - top_BGRL1)
    total_BGRL1 = share_BGRLS.sum(-1, keepdims=True) + jnp.exp(sink_1GR11 - top_BGRL1)
    return share_BGRLS / total_BGRL1
