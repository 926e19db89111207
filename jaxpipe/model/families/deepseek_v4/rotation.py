"""Rotation of the last dims of a head, in place.

Keys are also values, so what attention returns is rotated back, and the dims keep their order.
"""

import jax
import jax.numpy as jnp

from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.layers.rope.rotate import rotary_frequencies


def rotate_last(x_BLHK: jax.Array, positions_BL: jax.Array, config: DeepseekV4Config) -> jax.Array:
    """Rotate the pairs (2i, 2i + 1) of the last `qk_rope_head_dim` dims by position.

    At the negative of a position it is the inverse of the rotation at that position.
    """
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    still, turned = jnp.split(x_BLHK, [x_BLHK.shape[-1] - config.rotary_size], axis=-1)
    frequency_P = rotary_frequencies(config, config.rotary_size, wide)
    angle_BLP = positions_BL[..., None].astype(wide) * frequency_P[None, None]
    cos, sin = (config.rotary_scale * f(angle_BLP)[:, :, None] for f in (jnp.cos, jnp.sin))
    turned = turned.astype(wide)
    first, second = turned[..., 0::2], turned[..., 1::2]
    pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = pairs.reshape(turned.shape).astype(x_BLHK.dtype)
    return jnp.concatenate([still, turned], axis=-1)
