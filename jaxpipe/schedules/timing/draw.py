"""A schedule as text: one line per rank, one column per tick."""

from jaxpipe.core.schedule.action import Schedule, label
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.placing import place


def draw_timeline(schedule: Schedule, lockstep: Lockstep = PLAIN) -> str:
    """Return the grid of `place` as text: the label of every cell, a dot where idle.

    >>> from jaxpipe.schedules import build
    >>> print(draw_timeline(build("1f1b", pp=3, microbatches=4)))
    rank 0 | F0 F1 F2 .   .   BW0 F3  BW1 .   BW2 .   BW3
    rank 1 | .  F0 F1 .   BW0 F2  BW1 F3  BW2 .   BW3 .
    rank 2 | .  .  F0 BW0 F1  BW1 F2  BW2 F3  BW3 .   .
    """
    grid = place(schedule, lockstep)
    stages = schedule.labels_stages
    columns = [[label(*cell.actions, stages=stages) or "." for cell in row] for row in grid]
    widths = [max(map(len, column)) for column in columns]
    width = len(str(schedule.pp - 1))
    lines = []
    for rank in range(schedule.pp):
        cells = " ".join(column[rank].ljust(w) for column, w in zip(columns, widths))
        lines.append(f"rank {rank:{width}} | {cells}".rstrip())
    return "\n".join(lines)
