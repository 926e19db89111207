"""Rotation of queries and keys by their positions, with scaled wavelengths.

Shapes: B examples, L tokens, H heads, K the rotated width of a head.
"""

import math

import jax
import jax.numpy as jnp

from jaxpipe.model.layers.rope.config import RotaryConfig


def rotary_frequencies(config: RotaryConfig, width: int, dtype: jnp.dtype) -> jax.Array:
    """Radians per position of each of `width` / 2 pairs of dims, `[K / 2]`: theta^(-2i/K).

    A frequency is divided by `rope_factor` in part: fully where the wavelength is long, not at all
    where it is short, and blended between (`rope_scaling`); or by a factor of its own (Ding et al.
    2024, "LongRoPE").
    """
    half = width // 2
    frequency_K = config.rope_theta ** (-jnp.arange(half, dtype=dtype) / half)
    if config.rope_scaling == "longrope":
        return frequency_K / jnp.asarray(config.longrope_factors, dtype)
    if config.rope_factor == 1 or config.rope_scaling == "dynamic":
        return frequency_K
    kept_K = _unscaled_share(config, frequency_K)
    return frequency_K * (kept_K + (1 - kept_K) / config.rope_factor)


def _unscaled_share(config: RotaryConfig, frequency_K: jax.Array) -> jax.Array | float:
    """The share of each frequency that is not divided, 0 to 1.

    `linear` (Chen et al. 2023) divides all. `llama3` blends over the rotations that a pair makes in
    the original positions (Grattafiori et al. 2024, section 3.4.2, in the form of its released
    code), `yarn` over the index of the pair, between those that make `rope_beta_fast` and
    `rope_beta_slow` rotations (Peng et al. 2023, section 3.2, and as transformers'
    `_compute_yarn_parameters`).
    """
    if config.rope_scaling == "linear":
        return 0.0
    if config.rope_scaling == "llama3":
        rotations_K = config.rope_original_positions * frequency_K / (2 * jnp.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        if low == high:
            return (rotations_K >= low).astype(rotations_K.dtype)
        return jnp.clip((rotations_K - low) / (high - low), 0, 1)
    half = len(frequency_K)
    first, last = _yarn_bounds(config, 2 * half)
    index_K = jnp.arange(half, dtype=frequency_K.dtype)
    return 1 - jnp.clip((index_K - first) / (last - first), 0, 1)


def _yarn_bounds(config: RotaryConfig, width: int) -> tuple[float, float]:
    """Indices of the pairs between which yarn blends."""

    def index(rotations: float) -> float:
        wavelengths = math.log(config.rope_original_positions / (rotations * 2 * math.pi))
        return width * wavelengths / (2 * math.log(config.rope_theta))

    first, last = index(config.rope_beta_fast), index(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else first + 0.001  # as transformers avoids 0 / 0


def rotary(
    x_BLHK: jax.Array,
    positions_BL: jax.Array,
    config: RotaryConfig,
    neighbours: bool | None = None,
) -> jax.Array:
    """Rotate pairs of dims of each head by position (Su et al. 2021).

    The first `config.rotary_size` dims of a head rotate, the rest stays as it is. Pair number i
    rotates by position times its frequency, and is multiplied by `config.rotary_scale`. It is (i, i
    + K/2), the halves of these dims; with `neighbours` it is (2i, 2i+1), and comes out at
    (i, i + K/2), which scores do not see if queries and keys both do. None: as the architecture
    says.
    """
    neighbours = config.VARIANT.rotates_neighbours if neighbours is None else neighbours
    if config.rotary_size < x_BLHK.shape[-1]:
        x_BLHK, rest = jnp.split(x_BLHK, [config.rotary_size], axis=-1)
        rotated = rotary(x_BLHK, positions_BL, config, neighbours)
        return jnp.concatenate([rotated, rest], axis=-1)
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    frequency_K = rotary_frequencies(config, x_BLHK.shape[-1], wide)
    angle_BLK = positions_BL[..., None].astype(wide) * frequency_K[None, None]
    cos, sin = jnp.cos(angle_BLK)[:, :, None], jnp.sin(angle_BLK)[:, :, None]
    if config.rotary_scale != 1:
        cos, sin = config.rotary_scale * cos, config.rotary_scale * sin
    wide_BLHK = x_BLHK.astype(wide)
    if neighbours:
        first, second = wide_BLHK[..., 0::2], wide_BLHK[..., 1::2]
    else:
        first, second = jnp.split(wide_BLHK, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHK.dtype)
