"""The cells of a schedule in topological order, each after the cells whose results it reads.

Every model of time computes start times in one pass over this order: a cell starts once the
previous cell of its rank has ended and its inputs from other ranks have arrived.
"""

from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from jaxpipe.schedule.action import (
    Cell,
    Schedule,
    ScheduleError,
    Value,
    external_values,
    produced_value,
)


class OrderedCell(NamedTuple):
    """A cell and its rank; `inputs` has the positions of cells of other ranks that it reads."""

    rank: int
    cell: Cell
    inputs: tuple[int, ...]


@lru_cache(maxsize=32)  # the same schedule is proved, timed and placed; a plan has about two dozen
def sort_topologically(schedule: Schedule) -> tuple[OrderedCell, ...]:
    """Return all cells in a topological order that keeps the order of each rank.

    Raises `ScheduleError` for a deadlock; the message names the first blocked rank and its cell.

    >>> from jaxpipe.schedule import build
    >>> line = sort_topologically(build("1f1b", pp=2, microbatches=1))
    >>> [(place.rank, str(place.cell), place.inputs) for place in line]
    [(0, 'F0@0', ()), (1, 'F0@1', (0,)), (1, 'BW0@1', ()), (0, 'BW0@0', (2,))]
    """
    line: list[OrderedCell] = []
    computed: dict[Value, int] = {}  # value -> position of its cell in the line
    waits: dict[Value, int] = {}  # value not computed yet -> the rank blocked on it
    positions = [0] * schedule.pp
    runnable = list(reversed(range(schedule.pp)))
    while runnable:
        rank = runnable.pop()
        for cell in islice(schedule.ranks[rank], positions[rank], None):
            needed = external_values(cell, schedule.stages)
            missing = next((value for value in needed if value not in computed), None)
            if missing is not None:
                waits[missing] = rank
                break
            before = (computed[value] for value in needed)
            for value in filter(None, map(produced_value, cell.actions)):
                computed[value] = len(line)
                if value in waits:
                    runnable.append(waits.pop(value))
            others = tuple(other for other in before if line[other].rank != rank)
            line.append(OrderedCell(rank, cell, others))
            positions[rank] += 1
    for rank, order in enumerate(schedule.ranks):
        if positions[rank] < len(order):
            cell = order[positions[rank]]
            value = next(v for v in external_values(cell, schedule.stages) if v not in computed)
            raise ScheduleError(
                f"deadlock: rank {rank} waits at {cell} (position {positions[rank]}) for "
                f"{value.kind} of stage {value.stage}, microbatch {value.microbatch}, which never "
                f"comes."
            )
    return tuple(line)
