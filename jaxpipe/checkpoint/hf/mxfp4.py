"""MXFP4 weights: 4-bit floats with one scale, a power of two, for every 32 neighbours.

gpt-oss's files hold a matrix `[E, in, out]` as `NAME_blocks` `[E, out, in / 32, 16]` and
`NAME_scales` `[E, out, in / 32]`, both uint8. A byte has two values, the first in its lower half; a
scale is the exponent plus 127. Source: Open Compute Project, "Microscaling Formats (MX) v1.0".
"""

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
DTYPE = np.dtype(jnp.bfloat16)  # holds every value: 1 bit of mantissa, 8 of the exponent
_PER_BLOCK, _BIAS = 32, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)  # E2M1, sign first


def names_of(stored: Collection[str]) -> list[str]:
    """Names of the matrices that are stored as blocks and scales.

    >>> names_of(["a_blocks", "a_scales", "b_blocks", "c"])
    ['a']
    """
    names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
    return [name for name in names if name + SCALES in stored]


def shape_of(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a matrix, by that of its blocks.

    >>> shape_of((4, 96, 2, 16))
    (4, 64, 96)
    """
    *experts, outputs, count, _ = blocks
    return (*experts, count * _PER_BLOCK, outputs)


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrix `[..., in, out]`, exactly, in bfloat16."""
    pairs = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)  # the lower half comes first
    values = _VALUES[pairs].reshape(*blocks.shape[:-1], _PER_BLOCK)
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    return values.astype(DTYPE).reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)
