"""The cells of a schedule in one line, each behind those whose results it waits for.

Whatever the clock, when a cell begins follows from one pass along the line: once the cell before it
on its rank has ended, and what other ranks make for it is there.
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
    """A cell of a rank; `before` are the places in the line of what it needs of other ranks."""

    rank: int
    cell: Cell
    before: tuple[int, ...]


@lru_cache(maxsize=32)  # a schedule is proved, timed and laid out in turn; a plan has two dozen
def in_line(schedule: Schedule) -> tuple[Place, ...]:
    """All cells, those of a rank in its order.

    Raises `ScheduleError` for a deadlock, and names the cell where the first rank stands still.

    >>> from jaxpipe.schedule import build
    >>> line = in_line(build("1f1b", pp=2, microbatches=1))
    >>> [(place.rank, str(place.cell), place.before) for place in line]
    [(0, 'F0@0', ()), (1, 'F0@1', (0,)), (1, 'BW0@1', ()), (0, 'BW0@0', (2,))]
    """
    line: list[Place] = []
    made: dict[Value, int] = {}  # value -> where its cell is in the line
    waits: dict[Value, int] = {}  # value not made yet -> the rank that stands still for it
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
