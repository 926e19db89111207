"""Token cross-entropy as a sum and a count, so that microbatches add up exactly.

Shapes: B examples, L tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp

IGNORE = -100  # a target that counts for nothing


def cross_entropy_sum(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Sum over the tokens that are not ignored of -log softmax(logits)[target], in nats.

    Computed in float32, or in the logits' own dtype if that is wider.
    """
    logits_BLV = logits_BLV.astype(jnp.promote_types(logits_BLV.dtype, jnp.float32))
    valid_BL = targets_BL != IGNORE
    picked_BL = jnp.where(valid_BL, targets_BL, 0)
    at_target_BL = jnp.take_along_axis(logits_BLV, picked_BL[..., None], axis=-1)[..., 0]
    losses_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - at_target_BL
    return jnp.sum(jnp.where(valid_BL, losses_BL, 0))


def count_valid(targets_BL: jax.Array) -> jax.Array:
    """Number of targets that are not ignored."""
    return jnp.sum(targets_BL != IGNORE)
