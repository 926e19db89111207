"""Move rows into slots and back: how tokens come to experts, with gathers in both directions.

Each of N tokens has K rows, one per chosen expert: R = N K rows, and row K n + j is the j-th of
token n. Rows are moved into S slots, some of which may stay empty; a row without a slot is dropped.
`gather_into_slots` and `sum_from_slots` are each other's transpose, and both are written as
gathers, because XLA executes a scatter one row at a time. F stores the indices, so that no
sort is repeated; W recomputes the gather, and moved rows are not stored (`pipeline.crossing`).
The indices are barriers of fusion: without one XLA computes an index again for every element of the
row that it selects.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SLOTS = "slots"  # checkpoint name of the indices, which F always stores


class SlotAssignment(NamedTuple):
    """Which row is in which slot.

    Attributes:
      source_S: the row in each slot; R in an empty slot.
      target_R: the slot of each row; S for a row that is dropped.
    """

    source_S: jax.Array
    target_R: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_into_slots(x_ND: jax.Array, places: SlotAssignment, copies: int) -> jax.Array:
    """Gather the token of each slot's row, `[N, D] -> [S, D]`; K = `copies`, zeros if empty."""
    return _gather_rows(x_ND, places.source_S // copies)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def sum_from_slots(x_SD: jax.Array, places: SlotAssignment, copies: int) -> jax.Array:
    """Sum each token's rows over their slots, `[S, D] -> [N, D]`; K = `copies`.

    The K gathers and their sum are one loop of a GPU, which a reduction over rows is not.
    """
    wide = jnp.promote_types(x_SD.dtype, jnp.float32)
    target_NK = places.target_R.reshape(-1, copies)
    rows = (_gather_rows(x_SD, target_NK[:, copy]).astype(wide) for copy in range(copies))
    return sum(rows).astype(x_SD.dtype)


gather_into_slots.defvjp(
    lambda x_ND, places, copies: (gather_into_slots(x_ND, places, copies), places),
    lambda copies, places, dx_SD: (sum_from_slots(dx_SD, places, copies), None),
)
sum_from_slots.defvjp(
    lambda x_SD, places, copies: (sum_from_slots(x_SD, places, copies), places),
    lambda copies, places, dx_ND: (gather_into_slots(dx_ND, places, copies), None),
)


def assign_sorted(group_R: jax.Array) -> SlotAssignment:
    """Give every row a slot, sorted by group; rows of a group keep their order.

    >>> [field.tolist() for field in assign_sorted(jnp.array([1, 0, 1, 0]))]
    [[1, 3, 0, 2], [2, 0, 3, 1]]
    """
    order_R = jnp.argsort(group_R)
    return _stored(SlotAssignment(order_R, jnp.argsort(order_R)))


def assign_groups(
    group_R: jax.Array, groups: int, multiple: int
) -> tuple[SlotAssignment, jax.Array]:
    """Give every row of a group a slot; each group's slots are a multiple, which rows fill first.

    There are as many slots as may be needed. Rows whose group number is `groups` or more belong to
    no group: they have no slot, or one behind those of the groups.

    Returns:
      The slots, and the number of each group's slots, `[groups]` int32.

    >>> slots, sizes = assign_groups(jnp.array([2, 0, 2, 3, 2]), groups=3, multiple=2)
    >>> [field.tolist() for field in slots], sizes.tolist()
    ([[1, 5, 0, 2, 4, 5, 5, 5], [2, 0, 3, 8, 4]], [2, 0, 4])
    """
    rows, count_G = group_R.size, count_values(group_R, groups)
    if multiple == 1:
        return assign_sorted(group_R), count_G
    size_G = -(-count_G // multiple) * multiple
    slots = (rows + min(groups, rows) * (multiple - 1)) // multiple * multiple
    ends_G = jnp.cumsum(size_G)
    # All slots of such a block are of one group, or of none.
    begin_I = jnp.arange(0, slots, multiple)
    group_I = jnp.searchsorted(ends_G, begin_I, side="right", method="compare_all")
    group_S = jnp.repeat(group_I, multiple)
    places = _fill_slots(group_R, count_G, count_G, ends_G - size_G, group_S)
    return places, size_G


def assign_equally(
    group_R: jax.Array, groups: int, room: int, most_G: jax.Array | None = None
) -> SlotAssignment:
    """Give each group `room` slots, which its first rows fill in order; other rows are dropped.

    At most `most_G` slots of each group are filled. A row whose group number is `groups` or more
    belongs to no group and has no slot.

    >>> slots = assign_equally(jnp.array([1, 1, 1, 0, 2]), groups=2, room=2)
    >>> [field.tolist() for field in slots]
    [[3, 5, 0, 1], [2, 3, 4, 0, 4]]
    """
    count_G = count_values(group_R, groups)
    filled_G = jnp.minimum(count_G, room if most_G is None else most_G)
    group_G = jnp.arange(groups)
    return _fill_slots(group_R, count_G, filled_G, room * group_G, jnp.repeat(group_G, room))


def _fill_slots(
    group_R: jax.Array, count_G: jax.Array, filled_G: jax.Array, first_G: jax.Array,
    group_S: jax.Array,
) -> SlotAssignment:  # fmt: skip
    """Put the first `filled_G` of each group's `count_G` rows into slots from `first_G` on.

    `group_S` is the group of each slot; a number that is no group's marks an empty slot.
    """
    rows, order_R = group_R.size, jnp.argsort(group_R)
    order_R, rank_R = lax.optimization_barrier((order_R, jnp.argsort(order_R)))
    begin_G = jnp.cumsum(count_G) - count_G
    place_R = rank_R - begin_G[group_R]
    fits_R = place_R < filled_G.at[group_R].get(mode="fill", fill_value=0)
    target_R = jnp.where(fits_R, first_G[group_R] + place_R, group_S.size)
    place_S = jnp.arange(group_S.size) - first_G[group_S]
    sorted_S = jnp.minimum(begin_G[group_S] + place_S, rows - 1)
    source_S = jnp.where(
        place_S < filled_G.at[group_S].get(mode="fill", fill_value=0), order_R[sorted_S], rows
    )
    return _stored(SlotAssignment(source_S, target_R))


def _stored(places: SlotAssignment) -> SlotAssignment:
    """The indices behind a barrier, under a name by which F stores them."""
    return jax.tree.map(
        lambda index: checkpoint_name(index, SLOTS), lax.optimization_barrier(places)
    )


def count_dropped(places: SlotAssignment, group_R: jax.Array, groups: int) -> jax.Array:
    """Count the rows of the groups that have no slot: an int32 scalar."""
    none_R = places.target_R == places.source_S.size
    return jnp.sum(none_R & (group_R < groups), dtype=jnp.int32)


def count_values(group: jax.Array, groups: int) -> jax.Array:
    """Count how often 0, 1, ... occur in an array: `[groups]` int32."""
    return jax.nn.one_hot(group.reshape(-1), groups, dtype=jnp.int32).sum(0, dtype=jnp.int32)


def _gather_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Index the first axis; an index past its end gives zeros."""
    return rows.at[index].get(mode="fill", fill_value=0)
