"""Attention by plain matrix products, in any dtype: over all keys at once, or block by block.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, R = H / G, K head dim; M =
R * L rows, the queries of all heads that read the same keys.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.core.contract.sequence import query_blocks
from jaxpipe.model.attention.blocks import PlainBlocks, count_halvings
from jaxpipe.model.attention.case import AttentionCase, xla_supports
from jaxpipe.model.attention.kernel import OnShares, Queries, attend_in_blocks
from jaxpipe.model.attention.keys import Keys


@dataclass(frozen=True)
class XlaKernel:
    """`model.attention="xla"`."""

    supports = staticmethod(xla_supports)

    def attend(self, case: AttentionCase, queries: Queries, keys: Keys) -> jax.Array:
        """Attention output of the queries, `[B, L, H, K]`; see `Kernel`."""
        sequence, length = case.sequence, queries.q_BLHK.shape[1]
        # Slices of one token, as in generation, are not blocks: scores are few, and blocks as many.
        has_blocks = sequence.heads or (case.slices and length > 1)
        if has_blocks and not queries.on_shares:
            return attend_in_blocks(case, queries, keys, PlainBlocks(count_halvings(length)))
        k_BSGK, v_BSGK = keys.opened().parts
        given, limits = (queries.q_BLHK, k_BSGK, v_BSGK), (case.window, queries.position_BL)
        if case.gathers or case.slices:
            place_L, token_S = queries.place_L(sequence), jnp.arange(k_BSGK.shape[1])
            mask_B1LS = attention_mask(place_L, token_S, *limits)
            return grouped_attention(*given, mask_B1LS, queries.on_shares, keys.sink_H)
        window, position_BL = limits
        return causal_attention(*given, window, queries.on_shares, position_BL, keys.sink_H)


def attention_mask(
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
            attention_mask(jnp.arange(begin, end), jnp.arange(first, end), window, position),
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
