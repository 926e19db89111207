"""Rows into slots and back: what brings tokens to experts, in gathers both ways.

Every token of N has K rows, one for each of its experts: R = N K rows, K n + j the j-th of token n.
They are moved into S slots, of which some may stay empty; rows that find none are dropped.
Moving rows into slots and adding up a token's rows from slots are each other's transpose. Spelled
out so, neither has a scatter, which XLA does one row at a time; indices depend on the choice alone,
and W makes them and the gather again rather than have rows stored (`jaxpipe.pipeline.cut`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Places(NamedTuple):
    """`source_S`: the row in each slot, R where it is empty; `target_R` the slot of each row.

    A row that is dropped has the target S.
    """

    source_S: jax.Array
    target_R: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def into_slots(x_ND: jax.Array, places: Places, copies: int) -> jax.Array:
    """The token of the row in each slot, `[S, D]`, of K = `copies`; zeros where it is empty."""
    return _gathered(x_ND, places.source_S // copies)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_slots(x_SD: jax.Array, places: Places, copies: int) -> jax.Array:
    """The sum of each token's rows that are in slots, `[N, D]`, of K = `copies`."""
    rows_RD = _gathered(x_SD, places.target_R)
    return rows_RD.reshape(-1, copies, x_SD.shape[-1]).sum(1)


into_slots.defvjp(
    lambda x_ND, places, copies: (into_slots(x_ND, places, copies), places),
    lambda copies, places, dx_SD: (from_slots(dx_SD, places, copies), None),
)
from_slots.defvjp(
    lambda x_SD, places, copies: (from_slots(x_SD, places, copies), places),
    lambda copies, places, dx_ND: (into_slots(dx_ND, places, copies), None),
)


def sorted_places(group_R: jax.Array) -> Places:
    """A slot for every row, those of group 0 first; rows of a group stay in order.

    >>> sorted_places(jnp.array([1, 0, 1, 0]))
    Places(source_S=Array([1, 3, 0, 2], dtype=int32), target_R=Array([2, 0, 3, 1], dtype=int32))
    """
    order_R = jnp.argsort(group_R)
    return Places(order_R, jnp.argsort(order_R))


def equal_places(
    group_R: jax.Array, groups: int, room: int, most_G: jax.Array | None = None
) -> Places:
    """`room` slots for each of the groups: their first rows in order; others are dropped.

    Of a group no more than `most_G` of them are filled. Rows of a number past the last group's are
    of none, and have no slot.

    >>> equal_places(jnp.array([1, 1, 1, 0, 2]), groups=2, room=2)
    Places(source_S=Array([3, 5, 0, 1], dtype=int32), target_R=Array([2, 3, 4, 0, 4], dtype=int32))
    """
    rows, (order_R, rank_R) = group_R.size, sorted_places(group_R)
    count_G = counts_of(group_R, groups)
    begin_G = jnp.cumsum(count_G) - count_G
    filled_G = jnp.minimum(count_G, room if most_G is None else most_G)
    place_R = rank_R - begin_G[group_R]
    fits_R = place_R < filled_G.at[group_R].get(mode="fill", fill_value=0)
    target_R = jnp.where(fits_R, group_R * room + place_R, groups * room)
    slots = jnp.arange(room)
    sorted_GC = jnp.minimum(begin_G[:, None] + slots[None], rows - 1)
    source_GC = jnp.where(slots[None] < filled_G[:, None], order_R[sorted_GC], rows)
    return Places(source_GC.reshape(-1), target_R)


def dropped_of(places: Places, group_R: jax.Array, groups: int) -> jax.Array:
    """How many rows of the groups have no slot: an int32 scalar."""
    none_R = places.target_R == places.source_S.size
    return jnp.sum(none_R & (group_R < groups), dtype=jnp.int32)


def counts_of(group: jax.Array, groups: int) -> jax.Array:
    """How many of an array's entries are 0, 1, ...: `[groups]` int32."""
    return jax.nn.one_hot(group.reshape(-1), groups, dtype=jnp.int32).sum(0, dtype=jnp.int32)


def _gathered(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of the first axis, and zeros where the index is past its end."""
    return rows.at[index].get(mode="fill", fill_value=0)
