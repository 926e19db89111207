"""Attention by definition, against which blocks of keys are compared."""

import jax
import jax.numpy as jnp

from jaxpipe.model.attention.blocks import KeyBlock, QueryBlock


def attention_ref(
    queries: QueryBlock, keys: KeyBlock, sink_H: jax.Array | None = None
) -> jax.Array:
    """Return attention by all scores, masked, which jax differentiates: `[B, L, H, K]`.

    A sink is the score of one more column, which is dropped after the softmax.
    """
    q_BLHK, copies = queries.q_BLHK, queries.q_BLHK.shape[2] // keys.k_BSGK.shape[2]
    k_BSHK, v_BSHK = (jnp.repeat(x, copies, 2) for x in keys[:2])
    score_BHLS = jnp.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    score_BHLS = jnp.where(queries.key_range.mask(keys.place_BS), score_BHLS, -jnp.inf)
    if sink_H is not None:
        column_BHL1 = jnp.broadcast_to(sink_H[None, :, None, None], (*score_BHLS.shape[:3], 1))
        score_BHLS = jnp.concatenate([score_BHLS, column_BHL1], -1)
    share_BHLS = jax.nn.softmax(score_BHLS)[..., : k_BSHK.shape[1]]
    return jnp.einsum("bhls,bshk->blhk", share_BHLS, v_BSHK)
