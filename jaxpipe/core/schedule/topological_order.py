"""The cells of a schedule in topological order, each after the cells whose results it reads.

Every model of time computes start times in one pass over this order: a cell starts once the
previous cell of its rank has ended and its inputs from other ranks have arrived.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxpipe.core.schedule.action import Cell, Op, Schedule, ScheduleError
from jaxpipe.core.schedule.values import Value, external_values, produced_value


class OrderedCell(NamedTuple):
    """A cell and its rank; `inputs` has the positions of cells of other ranks that it reads."""

    rank: int
    cell: Cell
    inputs: tuple[int, ...]


@lru_cache(maxsize=32)  # the same schedule is proved, timed and placed; a plan has about two dozen
def sort_topologically(schedule: Schedule) -> tuple[OrderedCell, ...]:
    """Return all cells in a topological order that keeps the order of each rank.

    Raises `ScheduleError` for a deadlock; the message names its cause (`_deadlock`).

    >>> from jaxpipe.core.schedule import one_f_one_b
    >>> line = sort_topologically(one_f_one_b(pp=2, microbatches=1))
    >>> [(place.rank, str(place.cell), place.inputs) for place in line]
    [(0, 'F0@0', ()), (1, 'F0@1', (0,)), (1, 'BW0@1', ()), (0, 'BW0@0', (2,))]
    """
    line: list[OrderedCell] = []
    computed = [-1] * (2 * schedule.stages * schedule.microbatches)  # position in the line
    waits: dict[int, int] = {}  # value not computed yet -> the rank blocked on it
    queues = [list(numbered_values(order, schedule)) for order in schedule.ranks]
    positions = [0] * schedule.pp
    runnable = list(reversed(range(schedule.pp)))
    while runnable:
        rank = runnable.pop()
        for cell, needed, produced in queues[rank][positions[rank] :]:
            before = [computed[value] for value in needed]
            if -1 in before:
                waits[needed[before.index(-1)]] = rank
                break
            for value in produced:
                computed[value] = len(line)
                if value in waits:
                    runnable.append(waits.pop(value))
            others = tuple([other for other in before if line[other].rank != rank])
            line.append(OrderedCell(rank, cell, others))
            positions[rank] += 1
    if any(at < len(order) for at, order in zip(positions, schedule.ranks)):
        raise ScheduleError(_deadlock(schedule, positions))
    return tuple(line)


def numbered_values(
    cells: Iterable[Cell], schedule: Schedule
) -> Iterator[tuple[Cell, list[int], list[int]]]:
    """Yield each cell with the values that it waits for and those that it produces, as integers.

    They are those of `external_values` and `produced_value`, which take many times as long: y of a
    stage and microbatch is `stage * microbatches + microbatch`, dx `stages * microbatches` more.
    """
    microbatches = schedule.microbatches
    to_dx = schedule.stages * microbatches
    w, computes_dx = Op.W, (Op.B, Op.BW)
    for cell in cells:
        forward, gradient = cell[:2]
        needed, produced, y = [], [], -1
        if forward is not None:
            y = forward[1] * microbatches + forward[2]
            produced.append(y)
            if y >= microbatches:
                needed.append(y - microbatches)
        if gradient is not None:
            op, stage, microbatch = gradient
            value = stage * microbatches + microbatch
            if op in computes_dx:
                produced.append(to_dx + value)
                if value != y:
                    needed.append(value)
                if value < to_dx - microbatches:
                    needed.append(to_dx + value + microbatches)
            elif op is w:
                needed.append(to_dx + value)
        yield cell, needed, produced


@lru_cache(maxsize=32)
def cell_kinds(schedule: Schedule) -> tuple[list[int], list[Cell]]:
    """Return the kind of every cell in topological order, and one cell of each kind.

    Cells of a kind run the same ops of the same stages on microbatches that enter at the same rank,
    so they take as long and have the same neighbours.
    """
    mirrored_from = schedule.placement.mirrored_from
    border = schedule.microbatches if mirrored_from is None else mirrored_from
    numbers: dict[tuple, int] = {}
    examples: list[Cell] = []
    kinds = []
    for _, cell, _ in sort_topologically(schedule):
        key = tuple([action and (action[0], action[1], action[2] >= border) for action in cell])
        number = numbers.setdefault(key, len(examples))
        if number == len(examples):
            examples.append(cell)
        kinds.append(number)
    return kinds, examples


def _deadlock(schedule: Schedule, positions: Sequence[int]) -> str:
    """Return why no rank can go on: a rank that waits for itself, or ranks that do in a circle.

    Args:
      schedule: with a deadlock.
      positions: of the cell at which each rank waits; the length of its order if it has finished.
    """
    producers = {
        value: (rank, position)
        for rank, order in enumerate(schedule.ranks)
        for position, cell in enumerate(order)
        for value in filter(None, map(produced_value, cell.actions))
    }
    computed = {
        value for value, (rank, position) in producers.items() if position < positions[rank]
    }

    def missing(rank: int) -> list[Value]:
        cell = schedule.ranks[rank][positions[rank]]
        return [v for v in external_values(cell, schedule.stages) if v not in computed]

    def waits(rank: int, value: Value) -> str:
        at = positions[rank]
        wait = f"waits at {schedule.ranks[rank][at]} (position {at}) for"
        if value not in producers:
            return f"{wait} {value.kind} of stage {value.stage}, microbatch {value.microbatch}"
        other, later = producers[value]
        of = "the same rank" if other == rank else f"rank {other}"
        return f"{wait} {schedule.ranks[other][later]} of {of} (position {later})"

    blocked = [r for r, order in enumerate(schedule.ranks) if positions[r] < len(order)]
    for rank in blocked:
        for value in missing(rank):
            if value not in producers:
                return f"deadlock: rank {rank} {waits(rank, value)}, which never comes."
            if producers[value][0] == rank:
                return f"deadlock: rank {rank} {waits(rank, value)}, which it runs later."
    chain = [blocked[0]]  # each waits for the next; what they end in is a circle
    while (following := producers[missing(chain[-1])[0]][0]) not in chain:
        chain.append(following)
    circle = chain[chain.index(following) :]
    told = ", which ".join(waits(rank, missing(rank)[0]) for rank in circle)
    return f"deadlock: rank {circle[0]} {told}: none of them can go on."
