"""Functions of queries, block by block, so that no array has as many queries as keys.

Shapes: B examples, L queries.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 64  # queries of a block


def last_padding(length: int) -> int:
    """Number of queries that the last of several blocks has besides `length` queries."""
    return -length % ROWS if length > ROWS else 0


def map_query_blocks(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Apply `function` to blocks of L, and return its results `[B, L, ...]` for all of L.

    A gradient computes a block again, so that only what the function is called with is stored.

    Args:
      function: `(indices [L of a block], *arrays of the block) -> [B, L of a block, ...]`; indices
        count from the first query.
      arrays: `[B, L, ...]` each, or trees of such arrays.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    if length <= ROWS:
        return function(jnp.arange(length), *arrays)
    count = -(-length // ROWS)

    def split(x: jax.Array) -> jax.Array:
        padding = ((0, 0), (0, last_padding(length)), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, padding).reshape(len(x), count, ROWS, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def of_block(operands: tuple[Any, ...]) -> jax.Array:
        begin, *block = operands
        return function(begin + jnp.arange(ROWS), *block)

    blocks = jax.lax.map(of_block, (jnp.arange(count) * ROWS, *jax.tree.map(split, arrays)))
    joined = blocks.swapaxes(0, 1)
    return joined.reshape(len(joined), count * ROWS, *joined.shape[3:])[:, :length]
