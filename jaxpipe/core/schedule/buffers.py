"""What a schedule stores and sends in the scan, without the tables: enough for a plan's bytes.

A ring buffer is as long as the most values that are live at once, so lengths need no slots.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpipe.core.schedule.action import Op, Schedule
from jaxpipe.core.schedule.lanes import Lane, assign_lanes, sent_messages
from jaxpipe.core.schedule.lifetimes import Buffers
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.pairs import OverlapPair, list_overlap_pairs
from jaxpipe.core.schedule.placing import PlacedCells, place_cells

_NEVER = -1  # the tick of an action that the schedule does not have


@dataclass(frozen=True)
class ScanBuffers:
    """The ring buffers and messages of a schedule in the scan.

    Attributes:
      ticks: number of ticks.
      slots, rank_slots, lanes, pairs: as in `Tables`.
      ops: kinds of work that some rank runs.
      lockstep: how the schedule is placed into ticks.
    """

    ticks: int
    slots: Buffers[int]
    rank_slots: tuple[Buffers[int], ...]
    lanes: tuple[Lane, ...]
    pairs: tuple[OverlapPair, ...]
    ops: frozenset[Op]
    lockstep: Lockstep


@lru_cache(maxsize=32)
def scan_buffers(schedule: Schedule, lockstep: Lockstep = PLAIN) -> ScanBuffers:
    """Return the buffers that `lower` gives its tables, without the tables.

    Raises `ScheduleError` as `place` does, and for a message to a rank that is not next on the
    ring.

    >>> from jaxpipe.core.schedule import one_f_one_b
    >>> scan_buffers(one_f_one_b(pp=2, microbatches=4)).slots.for_b
    2
    """
    placed = place_cells(schedule, lockstep)
    ticks = placed.tick_count + lockstep.vocab_parallel
    intervals = _intervals(schedule, placed, lockstep)
    counts = Buffers(*(_most_live(of_buffer, schedule.pp, ticks) for of_buffer in intervals))
    return ScanBuffers(
        ticks,
        Buffers(*(int(of_ranks.max()) for of_ranks in counts)),
        tuple(Buffers(*map(int, of_rank)) for of_rank in zip(*counts)),
        assign_lanes(schedule, sent_messages(schedule, placed.examples)),
        list_overlap_pairs(schedule.placement, placed.examples) if lockstep.pairs else (),
        frozenset(action.op for cell in placed.examples for action in cell.actions),
        lockstep,
    )


_Intervals = list[tuple[np.ndarray, ...]]  # arrays of ranks, first and last ticks


def _most_live(intervals: _Intervals, pp: int, ticks: int) -> np.ndarray:
    """Return the most intervals of each rank that have a tick in common, `[P]`."""
    change = np.zeros((pp, ticks + 2), np.int64)
    for ranks, first, last in intervals:
        np.add.at(change, (ranks, first), 1)
        np.add.at(change, (ranks, last + 1), -1)
    return change.cumsum(axis=1).max(axis=1)


def _intervals(schedule: Schedule, placed: PlacedCells, lockstep: Lockstep) -> Buffers[_Intervals]:
    """Return the live intervals of all values by buffer, as `live_intervals` does."""
    f, b, w, r = _action_ticks(schedule, placed)
    rank = _ranks(schedule)
    last = schedule.stages - 1
    trained = b != _NEVER
    computed = np.where(r == _NEVER, f, r)

    def where(chosen: np.ndarray, first: np.ndarray, end: np.ndarray) -> _Intervals:
        return [(rank[chosen], first[chosen], end[chosen])]

    def at_stage(stage: int) -> np.ndarray:
        chosen = trained.copy()
        chosen[:stage], chosen[stage + 1 :] = False, False
        return chosen if lockstep.defer_embed_head else np.zeros_like(chosen)

    state: _Intervals = []
    dstate: _Intervals = []
    if schedule.slices > 1:
        by_sequence = schedule.stages, -1, schedule.slices
        forwards, gradients = f.reshape(by_sequence), b.reshape(by_sequence)
        ends = np.maximum(forwards, gradients).max(axis=2)
        of_rank = rank.reshape(by_sequence)[:, :, 0]
        state = [tuple(x.ravel() for x in (of_rank, forwards.min(axis=2), ends))]
        if trained.any():
            dstate = [tuple(x.ravel() for x in (of_rank, gradients.min(axis=2), ends))]
    return Buffers(
        inbox=_inbox(f, b, rank, lockstep),
        for_b=where(trained, computed, b),
        for_w=where(trained, computed, w),
        for_r=where(r != _NEVER, f, r),
        stash=where(trained & (w != b), b, w),
        head=where(at_stage(last), f, w),
        embed=where(at_stage(0), b, w),
        state=state,
        dstate=dstate,
    )


def _inbox(f: np.ndarray, b: np.ndarray, rank: np.ndarray, lockstep: Lockstep) -> _Intervals:
    """Return the intervals of messages, from their arrival until they are read."""
    hop = np.where(rank[1:] == rank[:-1], 1, lockstep.transfer_ticks)
    trained = b != _NEVER
    of_head = trained[-1]  # without effect where F and its gradient share a cell: nothing waits
    intervals = [
        (rank[1:].ravel(), (f[:-1] + hop).ravel(), f[1:].ravel()),
        tuple(x[trained[:-1]] for x in (rank[:-1], b[1:] + hop, b[:-1])),
        tuple(x[of_head] for x in (rank[-1], f[-1] + 1, b[-1])),
    ]
    if lockstep.vocab_parallel:
        intervals.append((rank[0], f[0], f[0]))
    return intervals


def _action_ticks(schedule: Schedule, placed: PlacedCells) -> np.ndarray:
    """Return the ticks of F, of B or BW, of W or BW, and of R, `[4, stages, microbatches]`."""
    ticks = np.full((4, schedule.stages, schedule.microbatches), _NEVER)
    rows = {Op.F: (0,), Op.B: (1,), Op.W: (2,), Op.BW: (1, 2), Op.R: (3,), Op.U: ()}
    where: list[tuple[int, int, int, int]] = []
    for tick, cell in zip(placed.ticks, placed.cells):
        for op, stage, microbatch in cell.actions:
            where += [(row, stage, microbatch, tick) for row in rows[op]]
    row, stage, microbatch, tick = np.array(where).T
    ticks[row, stage, microbatch] = tick
    return ticks


def _ranks(schedule: Schedule) -> np.ndarray:
    """Return the rank of every stage and microbatch, `[stages, microbatches]`."""
    placement = schedule.placement
    ranks = np.repeat(np.array(placement.rank_of)[:, None], schedule.microbatches, axis=1)
    if placement.mirrored_from is not None:
        ranks[:, placement.mirrored_from :] = schedule.pp - 1 - ranks[:, placement.mirrored_from :]
    return ranks
