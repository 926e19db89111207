"""Softmax attention of grouped heads that moves no scores about.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, R = H / G, K head dim; M =
R * L rows, the queries of all heads that read the same keys.
"""

import jax
import jax.numpy as jnp

from jaxpipe.partition.sequence import query_blocks


def causal_attention(q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array) -> jax.Array:
    """Attention of every token to itself and all before it, `[B, L, H, K]`.

    A block of queries reads no keys after its last, so that of two blocks three quarters of the
    scores are made and stored.
    """
    length = q_BLHK.shape[1]
    rows = length // query_blocks(length)

    def block(begin: int, end: int) -> jax.Array:
        mask_11LS = jnp.tri(rows, end, begin, dtype=bool)[None, None]
        return grouped_attention(q_BLHK[:, begin:end], k_BLGK[:, :end], v_BLGK[:, :end], mask_11LS)

    return jnp.concatenate([block(i, i + rows) for i in range(0, length, rows)], axis=1)


def grouped_attention(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_11LS: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v where the mask is true, `[B, L, H, K]`.

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
    mixed_BGMK = jnp.einsum("bgms,bgsk->bgmk", share_BGMS.astype(v_BGSK.dtype), v_BGSK)
    mixed_BLGRK = mixed_BGMK.reshape(q_BGRLK.shape).transpose(0, 3, 1, 2, 4)
    return mixed_BLGRK.reshape(q_BLHK.shape).astype(dtype)
