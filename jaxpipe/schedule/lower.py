"""Lower a schedule to the integer tables that the scan reads, with buffer slots by liveness.

A tick of the executor runs in this order, which is also what makes two uses of a slot collide:
store what arrived; F reads its input and writes residuals; the head writes an output gradient; the
gradient action reads residuals and output gradient. So a slot is taken from the tick it is written
to the tick it is last read, both included. Slots are coloured greedily by start, which for
intervals uses the fewest possible: the most that are ever alive at once.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedule.action import Action, Op, Schedule, ScheduleError
from jaxpipe.schedule.cells import Grid, place

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class Tables:
    """One integer per (tick, rank) and column, and the sizes of the buffers they point into.

    Flags are 0 or 1. A slot column of a cell that does not use it holds the buffer's size, the
    index of the spare slot behind the last real one.

    Columns: `forward` runs F of `forward_mb`, reading slot `x_read` (the embedding instead where
    `embed`), leaving residuals in `residual_write`; `head` follows with the loss, leaving the
    output gradient in `dy_write`. `gradient` runs BW of `gradient_mb`, reading `residual_read` and
    `dy_read`; `embed_gradient` follows where it was stage 0. `x_arrive`, `dy_arrive` say where the
    messages that arrive in this tick go.
    """

    columns: dict[str, np.ndarray]
    x_slots: int
    dy_slots: int
    residual_slots: int
    residual_slots_of: tuple[int, ...]
    transfer_ticks: int

    @property
    def ticks(self) -> int:
        """Number of ticks T; every column is `[T, P]`."""
        return len(self.columns["forward"])

    @property
    def trains(self) -> bool:
        """Whether any gradient is computed."""
        return bool(self.columns["gradient"].any())


def lower(schedule: Schedule, *, transfer_ticks: int = 1, in_flight: int | None = None) -> Tables:
    """Tables of a schedule whose gradients are unsplit and whose ranks each hold one stage.

    `transfer_ticks` and `in_flight` are explained at `cells.place`. Raises `ScheduleError` for a
    schedule the executor cannot run.

    >>> from jaxpipe.schedule import build
    >>> tables = lower(build("1f1b", pp=2, microbatches=2))
    >>> tables.columns["forward_mb"].T.tolist(), tables.columns["gradient"].T.tolist()
    ([[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], [[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0]])
    """
    _check_runnable(schedule)
    grid = place(schedule, transfer_ticks=transfer_ticks, in_flight=in_flight)
    when = _ticks_of(grid)
    trains = any(op is Op.BW for op, _, _ in when)
    last = schedule.stages - 1

    x_alive, dy_alive, residual_alive = ([{} for _ in range(schedule.pp)] for _ in range(3))
    for (op, stage, m), tick in when.items():
        rank, key = schedule.placement.rank(stage, m), (stage, m)
        if op is Op.F:
            if stage:
                arrival = when[Action(Op.F, stage - 1, m)] + transfer_ticks
                x_alive[rank][key] = (arrival, tick)
            if trains:
                residual_alive[rank][key] = (tick, when[Action(Op.BW, stage, m)])
        else:
            source = Action(Op.F, stage, m) if stage == last else Action(Op.BW, stage + 1, m)
            arrival = when[source] + (0 if stage == last else transfer_ticks)
            dy_alive[rank][key] = (arrival, tick)

    x_slot, x_slots = _colour_all(x_alive)
    dy_slot, dy_slots = _colour_all(dy_alive)
    residual_slot, residual_slots = _colour_all(residual_alive)

    shape = (len(grid), schedule.pp)
    flags = ("forward", "forward_mb", "embed", "head", "gradient", "gradient_mb", "embed_gradient")
    columns = {name: np.zeros(shape, np.int32) for name in flags}
    for names, spare in (
        (("x_read", "x_arrive"), x_slots),
        (("dy_read", "dy_arrive", "dy_write"), dy_slots),
        (("residual_write", "residual_read"), residual_slots),
    ):
        columns |= {name: np.full(shape, spare, np.int32) for name in names}

    def put(tick: int, rank: int, **values: int) -> None:
        for name, value in values.items():
            columns[name][tick, rank] = value

    for (op, stage, m), tick in when.items():
        rank, key = schedule.placement.rank(stage, m), (stage, m)
        if op is Op.F:
            put(tick, rank, forward=1, forward_mb=m, embed=stage == 0, head=stage == last)
            if stage:
                put(tick, rank, x_read=x_slot[key])
                put(x_alive[rank][key][0], rank, x_arrive=x_slot[key])
            if trains:
                put(tick, rank, residual_write=residual_slot[key])
                if stage == last:
                    put(tick, rank, dy_write=dy_slot[key])
        else:
            put(tick, rank, gradient=1, gradient_mb=m, embed_gradient=stage == 0)
            put(tick, rank, dy_read=dy_slot[key], residual_read=residual_slot[key])
            if stage != last:
                put(dy_alive[rank][key][0], rank, dy_arrive=dy_slot[key])

    used = tuple(len({residual_slot[key] for key in alive}) for alive in residual_alive)
    return Tables(columns, x_slots, dy_slots, residual_slots, used, transfer_ticks)


def _check_runnable(schedule: Schedule) -> None:
    remedy = "train with gpipe, 1f1b or bfs"
    if schedule.stages != schedule.pp:
        raise ScheduleError(
            f"{schedule.name} has {schedule.stages} stages on {schedule.pp} ranks: the executor "
            f"runs one stage a rank; {remedy}."
        )
    if schedule.placement.mirrored_from is not None:
        raise ScheduleError(
            f"{schedule.name} runs both ways round the ranks: the executor runs one stage a rank; "
            f"{remedy}."
        )
    for rank, action in schedule.actions():
        if action.op in (Op.B, Op.W):
            raise ScheduleError(
                f"rank {rank}, {action}: the executor runs the unsplit gradient BW, not B and W; "
                f"{remedy}."
            )


def _ticks_of(grid: Grid) -> dict[Action, int]:
    return {
        action: tick for tick, row in enumerate(grid) for cell in row for action in cell.actions
    }


def _colour_all(alive: list[dict[Key, tuple[int, int]]]) -> tuple[dict[Key, int], int]:
    """Slots of every rank's intervals, and the size that serves the fullest rank."""
    slots: dict[Key, int] = {}
    for intervals in alive:
        slots |= colour(intervals.items())
    return slots, 1 + max(slots.values(), default=-1)


def colour(intervals: Iterable[tuple[Key, tuple[int, int]]]) -> dict[Key, int]:
    """The lowest free slot for each closed interval `(first, last)`, taken in order of start.

    >>> colour([("a", (0, 2)), ("b", (1, 3)), ("c", (3, 4))])
    {'a': 0, 'b': 1, 'c': 0}
    """
    slots: dict[Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (last tick, slot)
    for key, (first, last) in sorted(intervals, key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[key] = slot
        heapq.heappush(busy, (last, slot))
    return slots
