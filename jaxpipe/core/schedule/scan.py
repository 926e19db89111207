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

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.core.schedule.action import Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.lanes import PermutePairs, list_permute_pairs
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.placing import Grid, PlacedCells, place, place_cells

_PACES = (2, 3)
_GAIN = 1e-3  # relative gain that another candidate needs, since it has more ticks


def scan_starts(
    schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN
) -> tuple[Grid, np.ndarray]:
    """Return the grid of a schedule and the start of every cell `[T, P]`, in the unit of the costs.

    Raises `ScheduleError` where the schedule cannot finish, or sends to a rank not adjacent.
    """
    return place(schedule, lockstep), _clock(schedule, costs, lockstep)[1]


def scan_time(schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN) -> float:
    """Return the time of the scan from first start to last end; raise as `scan_starts` does."""
    return _end(*_clock(schedule, costs, lockstep))


def _clock(schedule: Schedule, costs: Costs, lockstep: Lockstep) -> tuple[np.ndarray, np.ndarray]:
    """Return the time and the start of every cell, `[T, P]` each."""
    placed = place_cells(schedule, lockstep)
    waits, meetings = scan_waits(schedule, placed, lockstep)
    times = _cell_times(placed, schedule.pp, costs)
    return times, cell_starts(times, waits, costs.transfer, lockstep.transfer_ticks, meetings)


def scan_waits(
    schedule: Schedule, placed: PlacedCells, lockstep: Lockstep
) -> tuple[np.ndarray, Iterable[int]]:
    """Return the arguments `neighbours` and `meetings` of `cell_starts` for a schedule's cells."""
    meetings: Iterable[int] = range(placed.tick_count) if lockstep.synchronizes_all else ()
    if lockstep.vocab_parallel and not lockstep.synchronizes_all:
        ops = [
            [(op.name, stage) for op, stage, _ in example.actions] for example in placed.examples
        ]
        meetings = vocab_parallel_ticks(
            ((t, *op) for t, kind in zip(placed.ticks, placed.kinds.tolist()) for op in ops[kind]),
            schedule.stages,
        )
    if schedule.updates:
        grid = place(schedule, lockstep)
        meetings = [*meetings, *(1 + validation_ticks(schedule, grid, lockstep))]
    return _neighbours(schedule, lockstep), meetings


def _neighbours(schedule: Schedule, lockstep: Lockstep) -> np.ndarray:
    """Return the ranks that each rank waits for, by phase, `[phases, 3, P]`."""
    routes = list_permute_pairs(schedule, lockstep.phases)
    return np.stack([neighbour_ranks(of_phase, schedule.pp) for of_phase in routes])


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
    waits = _neighbours(schedule, lockstep)
    times = _cell_times(place_cells(schedule, lockstep), schedule.pp, Costs())
    times = times[: done[1].max() + 1]

    def end(later: int) -> float:
        starts = cell_starts(times, waits, 0.0, 2, [1 + min(first[0] + later, most[0])])
        return (starts[-1] + times[-1]).max()

    return np.minimum(first + min(range(schedule.pp + 1), key=end), most)


def _cell_times(placed: PlacedCells, pp: int, costs: Costs) -> np.ndarray:
    """Return the time of every cell, `[T, P]`; 0 where a rank is idle."""
    times = np.zeros((placed.tick_count, pp))
    of_kind = np.array([costs.cell_time(cell) for cell in placed.examples])
    times[np.asarray(placed.ticks), placed.ranks] = of_kind[placed.kinds]
    return times


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
    paced, in_phases = [], []
    if lockstep.transfer_ticks == 2:
        paces = ((every, offset) for every in _PACES for offset in range(every))
        paced = [replace(lockstep, every=e, offset=o) for e, o in paces]
    if phased:
        in_phases = [replace(lockstep, transfer_ticks=1, phases=2)]
    if not (candidates := [*paced, *in_phases]):
        return lockstep
    shortest = scan_time(schedule, costs, lockstep)
    times = [time for alike in (paced, in_phases) for time in _scan_times(schedule, costs, alike)]
    for candidate, time in zip(candidates, times):
        if time < shortest * (1 - _GAIN):
            best, shortest = candidate, time
    return best


def _scan_times(schedule: Schedule, costs: Costs, candidates: Sequence[Lockstep]) -> list[float]:
    """Return `scan_time` of locksteps with the same transfers; infinity for those not possible.

    Candidates whose ranks never all synchronize are columns of one clock: to compute a tick takes
    as long for all of them as for one.
    """
    times: list[float] = []
    clocks: dict[int, np.ndarray] = {}  # times of cells, by candidate
    for number, lockstep in enumerate(candidates):
        times.append(math.inf)
        try:
            placed = place_cells(schedule, lockstep)
            waits, meetings = scan_waits(schedule, placed, lockstep)
        except ScheduleError:  # no tick is open to all of a cell, or a rank has several stages
            continue
        of_cells = _cell_times(placed, schedule.pp, costs)
        if meetings:
            starts = cell_starts(of_cells, waits, costs.transfer, lockstep.transfer_ticks, meetings)
            times[number] = _end(of_cells, starts)
        else:
            clocks[number] = of_cells
    if clocks:
        ticks, pp = max(map(len, clocks.values())), schedule.pp
        every = [np.pad(of, ((0, ticks - len(of)), (0, 0))) for of in clocks.values()]
        beside = np.concatenate([waits + pp * at for at in range(len(every))], axis=2)
        starts = cell_starts(np.hstack(every), beside, costs.transfer, candidates[0].transfer_ticks)
        for at, (number, of_cells) in enumerate(clocks.items()):
            own = starts[: len(of_cells), at * pp : (at + 1) * pp]
            times[number] = _end(of_cells, own)
    return times


def _end(times: np.ndarray, starts: np.ndarray) -> float:
    return float((starts[-1] + times[-1]).max())


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
