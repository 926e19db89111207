"""Embedding and loss that all ranks compute together, each with a part of the vocabulary.

After Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism": the last
stage is then no slower than the others. Ranks that meet every tick anyway need no passes of their
own for it: the work stands at the start of a tick, in which all of them do it for one microbatch.
"""

from collections.abc import Mapping

import numpy as np

from jaxpipe.schedule.action import Action, Op, Schedule
from jaxpipe.schedule.cells import Grid


def ranks_of(stage: int, schedule: Schedule) -> tuple[int, ...]:
    """The ranks that compute a stage, for one microbatch or another."""
    ranks = {schedule.placement.rank(stage, m) for m in range(schedule.microbatches)}
    return tuple(sorted(ranks))


def shared_end_columns(
    schedule: Schedule, grid: Grid, inbox: Mapping[Action, int], *, spare: int
) -> dict[str, np.ndarray]:
    """The columns `embed_r`, `head_r`, `embed_gradient_r`, `embed_write` of `Tables`; `dy_write`.

    `inbox` has the slot of every message by its reader; the grid has an empty last tick.
    """
    shape, last = (len(grid), schedule.pp), schedule.stages - 1
    first_ranks = ranks_of(0, schedule)
    names = [f"{end}_{rank}" for end in ("embed", "embed_gradient") for rank in first_ranks]
    names += [f"head_{rank}" for rank in ranks_of(last, schedule)]
    columns = {name: np.zeros(shape, np.int32) for name in names}
    columns |= {name: np.full(shape, spare, np.int32) for name in ("embed_write", "dy_write")}
    for tick, row in enumerate(grid):
        for rank, cell in enumerate(row):
            for action in cell.actions:
                op, stage, m = action
                if op is Op.F and stage == 0:
                    columns[f"embed_{rank}"][tick] = 1 + m
                    columns["embed_write"][tick, rank] = inbox[action]
                if op is Op.F and stage == last:
                    columns[f"head_{rank}"][tick + 1] = 1 + m
                if op in (Op.B, Op.BW) and stage == 0:
                    columns[f"embed_gradient_{rank}"][tick + 1] = 1 + m
    return columns
