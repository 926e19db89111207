"""The clock of the scan: when every rank starts every tick.

A rank waits only for the ranks that it forms a permute pair with. A permute ends on a rank once
these ranks have reached the same permute and the time of a message has passed: a receiver waits for
the sender and a sender for the receiver, whether or not a cell reads the message. This is how a
permute works on GPUs (NCCL's grouped send and receive). On CPU all ranks of a permute synchronize
(`Lockstep.synchronizes_all`).

With one-tick transfers the permute of a tick runs before its cell. With two-tick transfers it
starts with the cell, and only the next tick waits for it, so a rank may run one cell ahead of its
neighbours. With a parallel vocabulary all ranks synchronize in the ticks in which the embedding or
the head has work, and overlapping steps (`fuse_steps`) in the ticks in which they are validated.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxpipe.core.schedule.action import Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs, memoize_cell_time
from jaxpipe.core.schedule.lanes import PermutePairs, list_permute_pairs
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.placing import Grid, place

_PACES = (2, 3)
_GAIN = 1e-3  # relative gain that another candidate needs, since it has more ticks


def scan_starts(
    schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN
) -> tuple[Grid, np.ndarray]:
    """Return the grid of a schedule and the start of every cell `[T, P]`, in the unit of the costs.

    Raises `ScheduleError` where the schedule cannot finish, or sends to a rank not adjacent.
    """
    grid = place(schedule, lockstep)
    waits, meetings = scan_waits(schedule, grid, lockstep)
    times = _cell_times(grid, costs)
    return grid, cell_starts(times, waits, costs.transfer, lockstep.transfer_ticks, meetings)


def scan_waits(
    schedule: Schedule, grid: Grid, lockstep: Lockstep
) -> tuple[np.ndarray, Iterable[int]]:
    """Return the arguments `neighbours` and `meetings` of `cell_starts` for a schedule's grid."""
    routes = list_permute_pairs(schedule, lockstep.phases)
    meetings: Iterable[int] = range(len(grid)) if lockstep.synchronizes_all else ()
    if lockstep.vocab_parallel and not lockstep.synchronizes_all:
        actions = ((t, a) for t, row in enumerate(grid) for cell in row for a in cell.actions)
        meetings = vocab_parallel_ticks(
            ((t, op.name, stage) for t, (op, stage, _) in actions), schedule.stages
        )
    waits = np.stack([neighbour_ranks(of_turn, schedule.pp) for of_turn in routes])
    if schedule.updates:
        meetings = [*meetings, *(1 + validation_ticks(schedule, grid, lockstep))]
    return waits, meetings


def update_ticks(schedule: Schedule, grid: Grid) -> np.ndarray:
    """Return the tick in which every rank updates its stages after every fused step, `[N, P]`."""
    stages = np.bincount(schedule.placement.rank_of)
    updates = np.array([[cell.update is not None for cell in row] for row in grid])
    return np.stack(
        [np.flatnonzero(of_rank)[n - 1 :: n] for of_rank, n in zip(updates.T, stages)], axis=1
    )


def validation_ticks(schedule: Schedule, grid: Grid, lockstep: Lockstep) -> np.ndarray:
    """Return the ticks at whose ends all ranks together validate fused steps, `[N]`.

    A step is validated once all ranks have its gradients, and before one of them has the next
    step's. In between it is the first tick in which ranks wait least for each other, if all ops
    take as long: with two-tick transfers, some ranks run ahead of others.
    """
    done = update_ticks(schedule, grid)
    first, most = done.max(axis=1), np.append(done[1:].min(axis=1) - 1, len(grid) - 1)
    if lockstep.transfer_ticks == 1 or len(done) == 1:
        return first
    shown = grid[: done[1].max() + 1]
    waits = scan_waits(replace(schedule, updates=0), shown, lockstep)[0]
    times = _cell_times(shown, Costs())

    def end(later: int) -> float:
        starts = cell_starts(times, waits, 0.0, 2, [1 + min(first[0] + later, most[0])])
        return (starts[-1] + times[-1]).max()

    return np.minimum(first + min(range(schedule.pp + 1), key=end), most)


def _cell_times(grid: Grid, costs: Costs) -> np.ndarray:
    """Return the time of every cell, `[T, P]`."""
    taking = memoize_cell_time(costs)
    return np.array([[taking(cell) for cell in row] for row in grid])


def scan_time(schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN) -> float:
    """Return the time of the scan from first start to last end; raise as `scan_starts` does."""
    grid, starts = scan_starts(schedule, costs, lockstep)
    return max(float(t) + costs.cell_time(cell) for t, cell in zip(starts[-1], grid[-1]))


def optimize_pace(
    schedule: Schedule,
    costs: Costs,
    lockstep: Lockstep = PLAIN,
    *,
    phased: bool = False,
) -> Lockstep:
    """Return the lockstep with the `every`, `offset` and phased permutes of the shortest scan.

    A later candidate must be shorter by more than a thousandth. With `phased`, one-tick transfers
    in two phases are tried too. With one-tick transfers `every` gains nothing, because neighbours
    wait for each other's full cell in every tick.

    Raises `ScheduleError` as `scan_starts` does, if the schedule cannot run under `lockstep`.

    >>> from jaxpipe.core.schedule import interleaved_1f1b
    >>> schedule = interleaved_1f1b(pp=4, microbatches=16)
    >>> costs = Costs(1, 1.15, 0.85, transfer=0.05)
    >>> found = optimize_pace(schedule, costs, Lockstep(transfer_ticks=2))
    >>> found.every, scan_time(schedule, costs, found) < scan_time(schedule, costs, Lockstep(2))
    (2, True)
    """
    best = lockstep = replace(lockstep, every=1, offset=0, phases=1)
    candidates = [replace(lockstep, transfer_ticks=1, phases=2)] if phased else []
    if lockstep.transfer_ticks == 2:
        paces = ((every, offset) for every in _PACES for offset in range(every))
        candidates = [replace(lockstep, every=e, offset=o) for e, o in paces] + candidates
    shortest = scan_time(schedule, costs, lockstep) if candidates else 0.0
    for candidate in candidates:
        try:
            time = scan_time(schedule, costs, candidate)
        except ScheduleError:  # no tick is open to all of a cell, or a rank has several stages
            continue
        if time < shortest * (1 - _GAIN):
            best, shortest = candidate, time
    return best


def neighbour_ranks(pairs: PermutePairs, pp: int) -> np.ndarray:
    """Return the ranks that each rank waits for, `[3, P]`: itself and its two neighbours.

    A neighbour without a permute pair is replaced by the rank itself.

    >>> neighbour_ranks({1: ((0, 1), (1, 2)), -1: ((1, 0), (2, 1))}, 3).tolist()
    [[0, 1, 2], [1, 2, 2], [0, 0, 1]]
    """
    neighbours = np.tile(np.arange(pp), (3, 1))
    for pairs_one_way in pairs.values():
        for sender, receiver in pairs_one_way:
            up = (sender + 1) % pp == receiver
            neighbours[2 - up, sender], neighbours[1 + up, receiver] = receiver, sender
    return neighbours


def cell_starts(
    times: np.ndarray,
    neighbours: np.ndarray,
    transfer: float | np.ndarray,
    transfer_ticks: int,
    meetings: Iterable[int] = (),
) -> np.ndarray:
    """Return the start of every cell, `[T, P]`.

    Args:
      times: time of every cell, `[T, P]`.
      neighbours: the result of `neighbour_ranks` for every phase of permutes, `[phases, 3, P]`.
      transfer: time of a message; of the messages of each rank, if it is `[P]`.
      transfer_ticks: as in `Lockstep`.
      meetings: ticks in which all ranks start together.

    The first tick's permute carries no message and is not counted.
    """
    ticks, pp = times.shape
    together = np.zeros(ticks, bool)
    together[[tick for tick in meetings if tick < ticks]] = True
    sends = np.where((neighbours != neighbours[:, :1]).any(axis=1), transfer, 0.0)
    starts = np.zeros((ticks, pp))
    for tick in range(1, ticks):
        ends, phase = starts[tick - 1] + times[tick - 1], tick % len(neighbours)
        if transfer_ticks == 1:
            now = ends[neighbours[phase]].max(axis=0) + sends[phase]
        else:
            now = np.maximum(ends, starts[tick - 1][neighbours[phase]].max(axis=0) + sends[phase])
        starts[tick] = now.max() if together[tick] else now
    return starts


def vocab_parallel_ticks(ops: Iterable[tuple[int, str, int]], stages: int) -> list[int]:
    """Return the ticks of vocabulary-parallel work, as in `vocab_parallel_columns`.

    `ops` are `(tick, name, stage)`.
    """
    ticks = []
    for tick, name, stage in ops:
        if name == "F" and stage == 0:
            ticks.append(tick)
        if (name == "F" and stage == stages - 1) or (name in ("B", "BW") and stage == 0):
            ticks.append(tick + 1)
    return ticks
