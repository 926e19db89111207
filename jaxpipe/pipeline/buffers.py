"""Rings: fixed-size buffers on a rank whose slots the tables assign.

Slots are never negative, and JAX is told so: else every read and write also counts from the end,
which is 5 to 7 % of a step's compiled program.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any

_get = partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
_set = partial(lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)


def make_ring(slots: int, like: Any, *, fill: int = 0, poison: bool = False) -> jax.Array:
    """A ring `[slots, *like.shape]` of one value, or of poison, that must never be read."""
    return jnp.full((slots, *like.shape), poison_of(like.dtype) if poison else fill, like.dtype)


def to_host(tree: Tree) -> Tree:
    """The same arrays in the memory of the device's host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Tree) -> Tree:
    """The same arrays in the device's own memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def poison_of(dtype: Any) -> Any:
    """NaN, or for integers and booleans the largest value."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def read(rings: Tree, slot: jax.Array) -> Tree:
    """One slot of every ring of a tree."""
    return jax.tree.map(lambda ring: _get(ring, slot), rings)


def write(rings: Tree, values: Tree, slot: jax.Array) -> Tree:
    """The rings with `values` in one slot."""
    return jax.tree.map(
        lambda ring, value: _set(ring, value.astype(ring.dtype), slot), rings, values
    )


def spoil(rings: Tree, slot: jax.Array) -> Tree:
    """The rings with poison in one slot: what was there is no longer needed."""

    return jax.tree.map(lambda ring: _set(ring, poisoned(ring.shape[1:], ring.dtype), slot), rings)


def poisoned(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of poison."""
    return jnp.full(shape, poison_of(dtype), dtype)
