"""Columns of a vocabulary-parallel embedding and head, which all pipeline ranks compute together.

After Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism": the last
stage is then no slower than the others. The paper's separate passes are not needed, because ranks
synchronize in every tick: at the start of a tick all of them do this work for one microbatch.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxpipe.core.schedule.action import Op, Schedule
from jaxpipe.core.schedule.lifetimes import Buffers
from jaxpipe.core.schedule.placing import Grid
from jaxpipe.core.schedule.row import VocabParallelColumns


def stage_ranks(stage: int, schedule: Schedule) -> tuple[int, ...]:
    """Return the sorted ranks that compute a stage for any microbatch."""
    ranks = {schedule.placement.rank(stage, m) for m in range(schedule.microbatches)}
    return tuple(sorted(ranks))


def vocab_parallel_columns(
    schedule: Schedule, grid: Grid, slots: Sequence[Buffers[Mapping[Hashable, int]]], *, dummy: int
) -> VocabParallelColumns[np.ndarray]:
    """Return the columns of the vocabulary-parallel embedding and head.

    Args:
      schedule: the schedule that is lowered.
      grid: its cells, with an empty last tick.
      slots: slots of every rank by buffer; inbox slots have the reading action as key.
      dummy: index of the inbox's dummy slot.
    """
    shape, last = (len(grid), schedule.pp), schedule.stages - 1
    first_ranks, last_ranks = stage_ranks(0, schedule), stage_ranks(last, schedule)

    def numbers(ranks: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(shape, np.int32) for _ in ranks)

    columns = VocabParallelColumns(
        embed=numbers(first_ranks),
        head=numbers(last_ranks),
        embed_gradient=numbers(first_ranks),
        embed_write=np.full(shape, dummy, np.int32),
        dy_write=np.full(shape, dummy, np.int32),
    )
    embed = dict(zip(first_ranks, columns.embed))
    head = dict(zip(last_ranks, columns.head))
    embed_gradient = dict(zip(first_ranks, columns.embed_gradient))
    for tick, row in enumerate(grid):
        for rank, cell in enumerate(row):
            for action in cell.actions:
                op, stage, m = action
                if op is Op.F and stage == 0:
                    embed[rank][tick] = 1 + m
                    columns.embed_write[tick, rank] = slots[rank].inbox[action]
                if op is Op.F and stage == last:
                    head[rank][tick + 1] = 1 + m
                if op in (Op.B, Op.BW) and stage == 0:
                    embed_gradient[rank][tick + 1] = 1 + m
    return columns
