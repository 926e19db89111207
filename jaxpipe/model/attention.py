"""Softmax attention of grouped heads that moves no scores about.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, R = H / G, K head dim; M =
R * L rows, the queries of all heads that read the same keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.contract import LayerOutput, Side
from jaxpipe.model.dropout import NO_MASKS, Masks
from jaxpipe.model.fused import fused_attention
from jaxpipe.partition.sequence import WHOLE_SEQUENCE, WholeSequence, query_blocks


class Past(NamedTuple):
    """Keys and values of a sequence's tokens so far; what stands behind them is not read.

    `begin` is the number of those before this slice.
    """

    keys_BSGK: jax.Array
    values_BSGK: jax.Array
    begin: jax.Array | int


def with_past(y: jax.Array, past: Past | None, side: Side = Side()) -> LayerOutput:  # noqa: B008
    """What a layer returns: y, of a slice the keys and values up to its end, what is beside."""
    return LayerOutput(y, past and (past.keys_BSGK, past.values_BSGK), side)


@dataclass(frozen=True)
class Attend:
    """Causal attention as a layer asks for it: which keys reach its queries, and by which kernel.

    Attributes:
      sequence: what replicas that share a sequence have of it; they gather its keys and values.
      kernel: plain products of XLA, or the fused one of cuDNN.
      window: how many last tokens a query sees, its own included; 0: all.
    """

    sequence: WholeSequence = WHOLE_SEQUENCE
    kernel: Literal["xla", "cudnn"] = "xla"
    window: int = 0

    def __call__(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, past: Past | None = None,
        masks: Masks = NO_MASKS,
    ) -> tuple[jax.Array, Past | None]:  # fmt: skip
        """Every query mixes values up to its own, `[B, L, H, K]`; of a slice also the past.

        L is this device's stretch of the sequence, or of a slice of it, whose keys and values come
        after those of the past. The plain kernel drops shares as the masks say.
        """
        length = q_BLHK.shape[1]
        k_BSGK, v_BSGK = self.sequence.gather(k_BLGK), self.sequence.gather(v_BLGK)
        if past is not None:
            past = Past(
                _write(past.keys_BSGK, k_BSGK, past.begin),
                _write(past.values_BSGK, v_BSGK, past.begin),
                past.begin,
            )
            k_BSGK, v_BSGK, _ = past
        mask_11LS = self._causal(length, past)
        if self.kernel == "cudnn":
            mixed_BLHK = fused_attention(q_BLHK, k_BSGK, v_BSGK, mask_11LS, self.window)
        elif mask_11LS is None:
            mixed_BLHK = causal_attention(q_BLHK, k_BSGK, v_BSGK, self.window, masks)
        else:
            kept = masks.shares if masks.dropout.shares else None
            mixed_BLHK = grouped_attention(q_BLHK, k_BSGK, v_BSGK, mask_11LS, kept)
        return mixed_BLHK, past

    def _causal(self, length: int, past: Past | None) -> jax.Array | None:
        """Which of all tokens this device's L may see, `[1, 1, L, S]`; None where it has all."""
        if self.sequence.size == 1 and past is None:
            return None
        begin, tokens = self.sequence.start(length), length * self.sequence.size
        if past is not None:
            begin, tokens = begin + past.begin, past.keys_BSGK.shape[1]
        query_L1, token_1S = (begin + jnp.arange(length))[:, None], jnp.arange(tokens)[None]
        seen_LS = query_L1 >= token_1S
        if self.window:
            seen_LS &= query_L1 - token_1S < self.window
        return seen_LS[None, None]


def _write(whole_BSGK: jax.Array, own_BLGK: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole_BSGK, own_BLGK, begin, axis=1)


def causal_attention(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, window: int = 0,
    masks: Masks = NO_MASKS,
) -> jax.Array:  # fmt: skip
    """Attention of every token to itself and all before it, `[B, L, H, K]`.

    With a window, to so many last ones, itself included, as in transformers' `masking_utils.py`
    (Beltagy et al. 2020; Jiang et al. 2023). A block of queries reads no keys after its last, nor
    before its first's window, so that of two blocks at most three quarters of the scores are made
    and stored.
    """
    length = q_BLHK.shape[1]
    rows = length // query_blocks(length)

    def block(begin: int, end: int) -> jax.Array:
        first = max(begin - window + 1, 0) if window else 0
        mask_LS = jnp.tri(rows, end - first, begin - first, dtype=bool)
        if window:
            mask_LS &= ~jnp.tri(rows, end - first, begin - first - window, dtype=bool)
        keys = slice(first, end)
        return grouped_attention(
            q_BLHK[:, begin:end], k_BLGK[:, keys], v_BLGK[:, keys], mask_LS[None, None],
            partial(masks.shares, query=begin, key=first) if masks.dropout.shares else None,
        )  # fmt: skip

    return jnp.concatenate([block(i, i + rows) for i in range(0, length, rows)], axis=1)


def grouped_attention(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_11LS: jax.Array,
    kept: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """softmax(q k^T / sqrt(K)) v where the mask is true, `[B, L, H, K]`.

    `kept` says what is kept of the shares that the softmax makes, `[B, H, L, S]`; None: all.

    Ainslie et al. 2023 (grouped queries). `jax.nn.dot_product_attention` has scores of float64 in
    float32, and makes XLA on CPU copy scores or probabilities into another order six times a layer.
    Here they stay `[B, G, M, S]` in both products and their gradients, and only q, k, v and the
    result change their order, which is K / S as much. Scores and softmax are float32, or wider if q
    is; of float16 everything is, for XLA on CPU lacks its products.
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
    score_BGRLS = jnp.where(mask_11LS[:, :, None], score_BGRLS, jnp.finfo(wide).min)
    share_BGMS = jax.nn.softmax(score_BGRLS.reshape(score_BGMS.shape), axis=-1)
    if kept is not None:
        share_BGMS = kept(share_BGMS.reshape(b, h, length, keys)).reshape(score_BGMS.shape)
    mixed_BGMK = jnp.einsum("bgms,bgsk->bgmk", share_BGMS.astype(v_BGSK.dtype), v_BGSK)
    mixed_BLGRK = mixed_BGMK.reshape(q_BGRLK.shape).transpose(0, 3, 1, 2, 4)
    return mixed_BLGRK.reshape(q_BLHK.shape).astype(dtype)
