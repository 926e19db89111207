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
    external_needs,
    produced_by,
)


class Place(NamedTuple):
    """A cell and its rank; `before` has the positions of cells of other ranks that it reads."""

    rank: int
    cell: Cell
    before: tuple[int, ...]


@lru_cache(maxsize=32)  # the same schedule is proved, timed and placed; a plan has about two dozen
def in_line(schedule: Schedule) -> tuple[Place, ...]:
    """Return all cells in a topological order that keeps the order of each rank.

    Raises `ScheduleError` for a deadlock; the message names the first blocked rank and its cell.

    >>> from jaxpipe.schedule import build
    >>> line = in_line(build("1f1b", pp=2, microbatches=1))
    >>> [(place.rank, str(place.cell), place.before) for place in line]
    [(0, 'F0@0', ()), (1, 'F0@1', (0,)), (1, 'BW0@1', ()), (0, 'BW0@0', (2,))]
    """
    line: list[Place] = []
    made: dict[Value, int] = {}  # value -> position of its cell in the line
    waits: dict[Value, int] = {}  # value not computed yet -> the rank blocked on it
    done = [0] * schedule.pp
    runnable = list(reversed(range(schedule.pp)))
    while runnable:
        rank = runnable.pop()
        for cell in islice(schedule.ranks[rank], done[rank], None):
            needs = external_needs(cell, schedule.stages)
            missing = next((value for value in needs if value not in made), None)
            if missing is not None:
                waits[missing] = rank
                break
            before = (made[value] for value in needs)
            for value in filter(None, map(produced_by, cell.actions)):
                made[value] = len(line)
                if value in waits:
                    runnable.append(waits.pop(value))
            others = tuple(other for other in before if line[other].rank != rank)
            line.append(Place(rank, cell, others))
            done[rank] += 1
    for rank, order in enumerate(schedule.ranks):
        if done[rank] < len(order):
            cell = order[done[rank]]
            value = next(v for v in external_needs(cell, schedule.stages) if v not in made)
            raise ScheduleError(
                f"deadlock: rank {rank} waits at {cell} (position {done[rank]}) for "
                f"{value.kind} of stage {value.stage}, microbatch {value.microbatch}, which never "
                f"comes."
            )
    return tuple(line)
