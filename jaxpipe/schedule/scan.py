"""The scan's clock: when every rank begins every tick.

A rank waits for its own messages alone. A permute is over for it once those that it has routes with
have come to the same permute, and a message's time has passed: it waits as a receiver for what is
sent, and as a sender until the receiver is there to take it, whether a cell needs the message or
not. So works a permute on GPUs (NCCL's grouped send and receive). On CPU all ranks of a permute
meet (`Lockstep.meets`).

With one-tick transfers the permute of a tick stands before its cell. With two-tick transfers it
begins with the cell, and only the next tick waits for it; so a rank may run a cell ahead of its
neighbours. Where all ranks share the vocabulary they meet in every tick that has work at the ends.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxpipe.schedule.action import Schedule, ScheduleError
from jaxpipe.schedule.cells import Costs, Grid, place, timer
from jaxpipe.schedule.lanes import Routes, routes_of
from jaxpipe.schedule.lockstep import PLAIN, Lockstep

_PACES = (2, 3)
_GAIN = 1e-3  # what an idle tick more is worth


def scan_starts(
    schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN
) -> tuple[Grid, np.ndarray]:
    """The grid of a schedule, and the start of every cell `[T, P]`, in the unit of the costs.

    Raises `ScheduleError` where the schedule cannot finish, or sends to no neighbour.
    """
    routes, grid = routes_of(schedule, lockstep.turns), place(schedule, lockstep)
    times = _times(grid, costs)
    meetings: Iterable[int] = range(len(grid)) if lockstep.meets else ()
    if lockstep.vocab_parallel and not lockstep.meets:
        actions = ((t, a) for t, row in enumerate(grid) for cell in row for a in cell.actions)
        meetings = meetings_of(
            ((t, op.name, stage) for t, (op, stage, _) in actions), schedule.stages
        )
    waits = np.stack([waits_of(of_turn, schedule.pp) for of_turn in routes])
    return grid, starts_of(times, waits, costs.transfer, lockstep.transfer_ticks, meetings)


def _times(grid: Grid, costs: Costs) -> np.ndarray:
    """What every cell takes, `[T, P]`."""
    taking = timer(costs)
    return np.array([[taking(cell) for cell in row] for row in grid])


def scan_time(schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN) -> float:
    """How long the scan takes, from the first start to the last end; raises as `scan_starts`."""
    grid, starts = scan_starts(schedule, costs, lockstep)
    return max(float(t) + costs.of_cell(cell) for t, cell in zip(starts[-1], grid[-1]))


def paced(
    schedule: Schedule, costs: Costs, lockstep: Lockstep = PLAIN, *, turns: bool = False
) -> Lockstep:
    """The lockstep with the `every` and `offset` that make the scan shortest, or by turns.

    Of those that take as long, to a thousandth, it is the first; `turns`: two turns of one-tick
    transfers are tried too. With one-tick transfers and no turns, where each waits for the other's
    whole cell, there is nothing to gain.

    Raises as `scan_starts` where a schedule cannot be run as it is given.

    >>> from jaxpipe.schedule import build
    >>> schedule = build("interleaved_1f1b", pp=4, microbatches=16)
    >>> costs = Costs(1, 1.15, 0.85, transfer=0.05)
    >>> found = paced(schedule, costs, Lockstep(transfer_ticks=2))
    >>> found.every, scan_time(schedule, costs, found) < scan_time(schedule, costs, Lockstep(2))
    (2, True)
    """
    best = lockstep = replace(lockstep, every=1, offset=0, turns=1)
    ways = [replace(lockstep, transfer_ticks=1, turns=2)] if turns else []
    if lockstep.transfer_ticks == 2:
        paces = ((every, offset) for every in _PACES for offset in range(every))
        ways = [replace(lockstep, every=e, offset=o) for e, o in paces] + ways
    least = scan_time(schedule, costs, lockstep) if ways else 0.0
    for tried in ways:
        try:
            time = scan_time(schedule, costs, tried)
        except ScheduleError:  # a cell has actions of both kinds, or a rank several stages
            continue
        if time < least * (1 - _GAIN):
            best, least = tried, time
    return best


def waits_of(routes: Routes, pp: int) -> np.ndarray:
    """By rank itself and the two ranks beside it, `[3, P]`; itself where there is no route.

    >>> waits_of({1: ((0, 1), (1, 2)), -1: ((1, 0), (2, 1))}, 3).tolist()
    [[0, 1, 2], [1, 2, 2], [0, 0, 1]]
    """
    waits = np.tile(np.arange(pp), (3, 1))
    for routes_one_way in routes.values():
        for sender, receiver in routes_one_way:
            up = (sender + 1) % pp == receiver
            waits[2 - up, sender], waits[1 + up, receiver] = receiver, sender
    return waits


def starts_of(
    times: np.ndarray,
    waits: np.ndarray,
    transfer: float,
    transfer_ticks: int,
    meetings: Iterable[int] = (),
) -> np.ndarray:
    """Start of every cell `[T, P]`, of cells that take so long.

    `waits` `[turns, 3, P]`, of every turn as of `waits_of`; in `meetings`, ticks, all ranks begin
    together. The first exchange carries nothing and is not counted.
    """
    ticks, pp = times.shape
    together = np.zeros(ticks, bool)
    together[[tick for tick in meetings if tick < ticks]] = True
    sends = np.where((waits != waits[:, :1]).any(axis=1), transfer, 0.0)
    starts = np.zeros((ticks, pp))
    for tick in range(1, ticks):
        ends, turn = starts[tick - 1] + times[tick - 1], tick % len(waits)
        if transfer_ticks == 1:
            now = ends[waits[turn]].max(axis=0) + sends[turn]
        else:
            now = np.maximum(ends, starts[tick - 1][waits[turn]].max(axis=0) + sends[turn])
        starts[tick] = now.max() if together[tick] else now
    return starts


def meetings_of(ops: Iterable[tuple[int, str, int]], stages: int) -> list[int]:
    """The ticks in which all ranks compute a part of an end, as in `shared_end_columns`.

    Of ops as `(tick, name, stage)`.
    """
    found = []
    for tick, name, stage in ops:
        if name == "F" and stage == 0:
            found.append(tick)
        if (name == "F" and stage == stages - 1) or (name in ("B", "BW") and stage == 0):
            found.append(tick + 1)
    return found
