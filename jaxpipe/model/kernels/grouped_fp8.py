"""Grouped products of 8-bit floats: of each group's rows with its matrix, and with other rows.

Shapes: S rows, sorted by group; E groups; K contracted; M and N the other dims. Both operands are
contracted over their last dim (`jaxpipe.model.kernels.hopper`). The number of each group's rows is
a multiple of 128, as in the contiguous layout of DeepGEMM (DeepSeek-AI 2025), so that a tile of
rows has one matrix and nothing is masked.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.jax_internals import define_primitive

TILE = 128  # the number of a group's rows, and every width, is a multiple of it
NAME = "fp8_ragged_dot"  # of the primitive
_ROWS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (1,), ())


@dataclass(frozen=True)
class GroupedFp8:
    """Grouped products with float32 sums, times a scale.

    Attributes:
      cores: multiprocessors of the GPU that multiplies by a kernel; 0: the reference implementation
        multiplies, which widens the operands.
    """

    cores: int = 0

    def multiply(
        self, left: jax.Array, right: jax.Array, sizes_E: jax.Array, scale: jax.Array, dtype: Any
    ) -> jax.Array:
        """The products of either kind, by the dims of `right`.

        `left_SK` and `right_ENK`: each row times its group's matrix, `[S, N]`; rows of no group
        give zeros. `left_MS` and `right_NS`: the sums over each group's rows of their products,
        `[E, M, N]`; zeros without rows.
        """
        operands = left, right, sizes_E, scale
        (result,) = _PRODUCT.bind(*operands, dtype=jnp.dtype(dtype), cores=self.cores)
        return result


def flops(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """FLOPs of a grouped product by the shapes of its operands: all rows count."""
    return 2 * prod(left) * right[-2]


def _shapes(
    left: Any, right: Any, sizes_E: Any, scale: Any, *, dtype: Any, cores: int
) -> list[jax.ShapeDtypeStruct]:
    shape = left.shape[0], right.shape[-2]
    groups = sizes_E.shape if len(right.shape) == 2 else ()
    return [jax.ShapeDtypeStruct((*groups, *shape), dtype)]


def _lower(
    left: jax.Array, right: jax.Array, sizes_E: jax.Array, scale: jax.Array, *,
    dtype: Any, cores: int,
) -> list[jax.Array]:  # fmt: skip
    if not cores:
        return [multiply_ref(left, right, sizes_E, scale, dtype)]
    from jaxpipe.model.kernels.hopper import multiply_groups, multiply_rows

    multiply = multiply_groups if right.ndim == 2 else multiply_rows
    return [multiply(left, right, sizes_E, scale, dtype=dtype, cores=cores)]


def multiply_ref(
    left: jax.Array, right: jax.Array, sizes_E: jax.Array, scale: jax.Array, dtype: Any
) -> jax.Array:
    """The reference implementation; `right` is `[E, N, K]`, or `[N, S]` for sums over groups."""
    wide = jnp.promote_types(dtype, jnp.float32)  # in which products of 8-bit floats are exact
    numbers = _GROUPS if right.ndim == 2 else _ROWS
    result = lax.ragged_dot_general(left.astype(wide), right.astype(wide), sizes_E, numbers)
    return (result * scale).astype(dtype)


_PRODUCT = define_primitive(NAME, _shapes, _lower)
