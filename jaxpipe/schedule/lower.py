"""Lower a schedule to the integer tables that the scan reads, with buffer slots by liveness.

A tick of the executor runs in the following order, which decides whether two uses of a slot in the
same tick collide: it stores the messages that arrived and the values that stay on the rank; F reads
its input and writes residuals; the head replaces the last stage's y by its gradient; the gradient
action reads residuals and output gradient and writes the W stash.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.action import Action, Cell, Op, Placement, Schedule
from jaxpipe.schedule.cells import Grid, place
from jaxpipe.schedule.ends import ranks_of, shared_end_columns
from jaxpipe.schedule.lanes import Lane, Message, Routes, assign_lanes, hop_of, messages, routes_of
from jaxpipe.schedule.lifetimes import Buffers, colour, lifetimes, owner_of, sequence_of
from jaxpipe.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.schedule.row import Row, StepColumns, unused_columns

SlotOf = Buffers[Mapping[Hashable, int]]  # slots on one rank, by owner or by reading action
At = tuple[int, int]  # tick, rank


class Pair(NamedTuple):
    """An F and a gradient action of different chunks in one cell, which XLA may overlap."""

    forward: int
    op: Op
    gradient: int


@dataclass(frozen=True)
class Tables:
    """A schedule as the scan reads it, and the lengths of the ring buffers its columns index.

    Attributes:
      columns: what every rank does in every tick; read-only int32 arrays `[T, P]`.
      slots: length of every ring buffer, without the dummy slot; `slots_of`: slots each rank uses.
      lanes: the messages that a permute carries in every tick.
      routes: by phase (`turns`) and hop, the permute pairs; a rank waits only for the ranks that it
        forms a permute pair with.
      pairs: the entries that the column `pair` indexes.
      lockstep: the options with which the schedule was placed into ticks.
      first_ranks, last_ranks: ranks that compute the first or last stage; two if bidirectional.
    """

    columns: Row[np.ndarray]
    slots: Buffers[int]
    slots_of: tuple[Buffers[int], ...]
    lanes: tuple[Lane, ...]
    routes: tuple[Routes, ...]
    pairs: tuple[Pair, ...]
    lockstep: Lockstep
    first_ranks: tuple[int, ...]
    last_ranks: tuple[int, ...]

    @property
    def ticks(self) -> int:
        """Number of ticks T; every column is `[T, P]`."""
        return len(self.columns.F)

    @property
    def trains(self) -> bool:
        """Whether the schedule computes gradients."""
        return bool(self.slots.for_b or self.slots.for_w)

    @property
    def forwards(self) -> list[int]:
        """The chunks whose F some cell runs outside `pairs`."""
        return self._chunks_of(Op.F)

    @property
    def gradients(self) -> list[tuple[Op, int]]:
        """The `(op, chunk)` of every gradient action that some cell runs outside `pairs`."""
        return [(op, chunk) for op in (Op.B, Op.BW, Op.W) for chunk in self._chunks_of(op)]

    @property
    def splits(self) -> bool:
        """Whether some backward is split into B and W."""
        return bool(self.slots.stash)

    def stores(self, column: np.ndarray) -> bool:
        """Return whether any cell uses a given column of inbox slots."""
        return bool((column < self.slots.inbox).any())

    def _chunks_of(self, op: Op) -> list[int]:
        return [value - 1 for value in np.unique(self.columns.chunk_of(op)).tolist() if value]


def grid_of(schedule: Schedule, lockstep: Lockstep) -> Grid:
    """Return the grid of `place`; with a parallel vocabulary it has one more, empty tick.

    The vocabulary-parallel head and embedding gradient process the results of a tick at the start
    of the next one.
    """
    grid = place(schedule, lockstep)
    return (*grid, (Cell(),) * schedule.pp) if lockstep.vocab_parallel else grid


@lru_cache(maxsize=4)  # the checks, the summary and the executor of a run share the tables
def lower(schedule: Schedule, lockstep: Lockstep = PLAIN) -> Tables:
    """Lower a schedule to tables.

    Raises `ScheduleError` for a placement in which consecutive stages are neither on the same nor
    on neighbouring ranks, and for the errors of `place`.

    >>> from jaxpipe.schedule import build
    >>> columns = lower(build("1f1b", pp=2, microbatches=2)).columns
    >>> columns.forward_mb.T.tolist(), columns.BW.T.tolist()
    ([[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], [[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0]])
    """
    grid = grid_of(schedule, lockstep)
    inputs = messages(schedule, grid, lockstep.transfer_ticks)
    alive = lifetimes(schedule, grid, inputs, lockstep)
    slot_of = [Buffers(*(colour(b.items()) for b in of_rank)) for of_rank in alive]
    used = tuple(
        Buffers(*(1 + max(slots.values(), default=-1) for slots in of_rank)) for of_rank in slot_of
    )
    slots = Buffers(*map(max, zip(*used)))
    lanes = assign_lanes(schedule, list(inputs.values()))
    pairs = _pairs(schedule.placement, grid) if lockstep.pairs else ()
    ends = None
    if lockstep.vocab_parallel:
        ends = shared_end_columns(schedule, grid, slot_of, spare=slots.inbox)
    steps = _steps(schedule, grid) if schedule.updates else None
    columns = unused_columns((len(grid), schedule.pp), slots, len(lanes), ends, steps)
    for tick, row in enumerate(grid):
        columns.turn[tick] = tick % lockstep.turns
        for rank, cell in enumerate(row):
            at = tick, rank
            _fill_ops(columns, at, cell, schedule.placement, pairs)
            for action in filter(None, cell[:2]):
                fill = _fill_forward if action.op is Op.F else _fill_gradient
                fill(columns, at, action, schedule, slot_of[rank])
                if action in inputs and inputs[action].stored is None:
                    columns.dy_of_head[at] = 1
    for action, message in inputs.items():
        if message.stored is not None:
            slot = slot_of[message.receiver].inbox[action]
            _fill_message(columns, message, slot, schedule, lanes)
    if columns.steps is not None:
        _fill_first_embeddings(columns)
    for leaf in _leaves(columns):
        leaf.setflags(write=False)
    first, last = (ranks_of(stage, schedule) for stage in (0, schedule.stages - 1))
    routes = routes_of(schedule, lockstep.turns)
    return Tables(columns, slots, used, lanes, routes, pairs, lockstep, first, last)


def _steps(schedule: Schedule, grid: Grid) -> StepColumns[np.ndarray]:
    """Flag step ends and starts: a rank updates all its stages in the tick of its last U."""
    updates = np.array([[cell.update is not None for cell in row] for row in grid], np.int32)
    stages = np.bincount(schedule.placement.rank_of)
    ends = updates * (updates.cumsum(axis=0) % stages == 0)
    begins = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    return StepColumns(ends, begins, np.zeros_like(ends))


def _fill_first_embeddings(columns: Row[np.ndarray]) -> None:
    """Flag the first embedding gradient of every rank and step."""
    done = columns.steps.ends.cumsum(axis=0) - columns.steps.ends
    for rank, of_rank in enumerate(columns.embed_gradient.T):
        (ticks,) = np.nonzero(of_rank)
        _, first = np.unique(done[ticks, rank], return_index=True)
        columns.steps.embeds[ticks[first], rank] = 1


def _leaves(columns: tuple) -> list[np.ndarray]:
    """Return the arrays of all columns, including those in nested tuples."""
    nested = [_leaves(c) if isinstance(c, tuple) else [c] for c in columns if c is not None]
    return [leaf for leaves in nested for leaf in leaves]


def _pairs(placement: Placement, grid: Grid) -> tuple[Pair, ...]:
    cells = {cell for row in grid for cell in row}
    return tuple(sorted({pair for cell in cells if (pair := _pair_of(cell, placement))}, key=str))


def _pair_of(cell: Cell, placement: Placement) -> Pair | None:
    """Return the pair of a cell whose two actions cannot depend on each other, else None."""
    if not (cell.forward and cell.gradient):
        return None
    forward, gradient = (placement.chunk(a.stage, a.microbatch) for a in cell[:2])
    return Pair(forward, cell.gradient.op, gradient) if forward != gradient else None


def _fill_ops(
    columns: Row[np.ndarray], at: At, cell: Cell, placement: Placement, pairs: tuple[Pair, ...]
) -> None:
    """Fill the ops of a cell: one pair, or each action by itself."""
    pair = _pair_of(cell, placement)
    if pair in pairs:
        columns.pair[at] = 1 + pairs.index(pair)
        return
    for op, stage, m in filter(None, cell[:2]):
        columns.chunk_of(op)[at] = 1 + placement.chunk(stage, m)


def _put(column: np.ndarray, at: At, slots: Mapping[Hashable, int], key: Hashable) -> None:
    """Write the slot of a key into a column, if the key has one."""
    if key in slots:
        column[at] = slots[key]


def _fill_forward(
    columns: Row[np.ndarray], at: At, action: Action, schedule: Schedule, slot_of: SlotOf
) -> None:
    """Fill the slots that an F reads and writes."""
    _, stage, m = action
    owner = owner_of(action)
    columns.forward_mb[at] = m
    columns.first_slice[at] = m % schedule.slices == 0
    if columns.ends is None:
        columns.embed[at] = stage == 0
        columns.head[at] = stage == schedule.stages - 1
    _put(columns.x_read, at, slot_of.inbox, action)
    _put(columns.for_b_write, at, slot_of.for_b, owner)
    _put(columns.for_w_write, at, slot_of.for_w, owner)
    _put(columns.head_write, at, slot_of.head, owner)
    _put(columns.state, at, slot_of.state, sequence_of(action, schedule))


def _fill_gradient(
    columns: Row[np.ndarray], at: At, action: Action, schedule: Schedule, slot_of: SlotOf
) -> None:
    """Fill the slots that a B, W or BW reads and writes."""
    op, stage, m = action
    owner, sequence = owner_of(action), sequence_of(action, schedule)
    columns.gradient_mb[at] = m
    columns.last_slice[at] = (m + 1) % schedule.slices == 0
    _put(columns.for_w_read, at, slot_of.for_w, owner)
    if op.gives_dx:
        _put(columns.dy_read, at, slot_of.inbox, action)
        _put(columns.for_b_read, at, slot_of.for_b, owner)
        _put(columns.dx_write, at, slot_of.embed, owner)
        _put(columns.state_read, at, slot_of.state, sequence)
        _put(columns.dstate, at, slot_of.dstate, sequence)
    if op.gives_dw:
        columns.head_weight[at] = owner in slot_of.head
        _put(columns.head_read, at, slot_of.head, owner)
        _put(columns.dx_read, at, slot_of.embed, owner)
    if op is Op.B:
        _put(columns.stash_write, at, slot_of.stash, owner)
    if op is Op.W:
        _put(columns.stash_read, at, slot_of.stash, owner)
    if columns.ends is None and stage == 0:
        waits = owner in slot_of.embed  # the embedding's gradient is deferred to W
        columns.embed_gradient[at] = op.gives_dw if waits else op.gives_dx


def _fill_message(
    columns: Row[np.ndarray],
    message: Message,
    slot: int,
    schedule: Schedule,
    lanes: tuple[Lane, ...],
) -> None:
    """Fill the slot that stores a message, and the lane that sends it."""
    kind, stage, _ = message.value
    if columns.ends is not None and (kind, stage) == ("y", schedule.stages - 1):
        column = columns.ends.dy_write
    elif message.sender == message.receiver:
        column = columns.keep_y if kind == "y" else columns.keep_dx
    else:
        hop = hop_of(message, schedule)
        index = next(i for i, lane in enumerate(lanes) if lane.hop == hop and kind in lane.kinds)
        columns.send[index][message.made + 1, message.sender] = 1 + lanes[index].kinds.index(kind)
        column = columns.arrive[index]
    column[message.stored, message.receiver] = slot
