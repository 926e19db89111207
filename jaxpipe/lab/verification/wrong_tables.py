"""Tables of a schedule with two entries of a column swapped on one pipeline rank.

The rank then reads another microbatch's value, as it would if a slot were given away too early.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxpipe.core.schedule import Tables

# The columns, also those of R, and the ring buffer that each indexes; None: it holds microbatches.
_BUFFERS = {
    "x_read": "inbox", "dy_read": "inbox", "for_b_read": "for_b", "for_w_read": "for_w",
    "stash_read": "stash", "for_r_read": "for_r", "forward_mb": None,
}  # fmt: skip


def swap_in(name: str) -> Callable[[Tables], Tables]:
    """A function that swaps the first two different entries of a column in use."""

    def swap(tables: Tables) -> Tables:
        column = _column(tables, name).copy()
        (first, rank), (second, _) = _places(tables, name)
        column[[first, second], rank] = column[[second, first], rank]
        columns, own = tables.columns, tables.columns.recompute
        if own is not None and hasattr(own, name):
            columns = columns._replace(recompute=own._replace(**{name: column}))
        else:
            columns = columns._replace(**{name: column})
        return replace(tables, columns=columns)

    return swap


def can_swap_in(name: str, tables: Tables) -> bool:
    """Whether a rank has two different entries in a column."""
    return len(_places(tables, name)) == 2


def _column(tables: Tables, name: str) -> np.ndarray:
    """A column of the tables; an empty one if it is of R and the schedule has none."""
    own = tables.columns.recompute
    default = np.zeros_like(tables.columns.F) if own is None else getattr(own, name, None)
    return getattr(tables.columns, name, default)


def _places(tables: Tables, name: str) -> list[tuple[int, int]]:
    """The ticks and the rank of two different entries in use, on the last rank that has such."""
    column, buffer = _column(tables, name), _BUFFERS[name]
    is_used = column > 0 if buffer is None else column < getattr(tables.slots, buffer)
    for rank in reversed(range(column.shape[1])):
        ticks = np.flatnonzero(is_used[:, rank])
        differ = [tick for tick in ticks if column[tick, rank] != column[ticks[0], rank]]
        if differ:
            return [(int(ticks[0]), rank), (int(differ[0]), rank)]
    return []
