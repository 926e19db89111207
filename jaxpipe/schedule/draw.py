"""A schedule as text: one line a rank, one column a tick."""

from jaxpipe.schedule.action import Op, Schedule
from jaxpipe.schedule.cells import Cell, place
from jaxpipe.schedule.lockstep import PLAIN, Lockstep

_LETTER = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "B"}


def timeline(schedule: Schedule, lockstep: Lockstep = PLAIN) -> str:
    """The grid of `place`: ops with their microbatch, a dot where idle.

    >>> from jaxpipe.schedule import build
    >>> print(timeline(build("1f1b", pp=3, microbatches=4)))
    rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    grid = place(schedule, lockstep)
    columns = [[_label(cell, schedule.stages > schedule.pp) for cell in row] for row in grid]
    widths = [max(map(len, column)) for column in columns]
    width = len(str(schedule.pp - 1))
    lines = []
    for rank in range(schedule.pp):
        cells = " ".join(column[rank].ljust(w) for column, w in zip(columns, widths))
        lines.append(f"rank {rank:{width}} | {cells}".rstrip())
    return "\n".join(lines)


def _label(cell: Cell, several_stages: bool) -> str:
    names = (
        f"{_LETTER[op]}{m}" + (f"@{stage}" if several_stages else "")
        for op, stage, m in cell.actions
    )
    return "+".join(names) or "."
