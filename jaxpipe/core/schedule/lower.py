"""Lower a schedule to the integer tables that the scan reads, with buffer slots by liveness.

A tick of the executor runs in the following order, which decides whether two uses of a slot in the
same tick collide: it stores the messages that arrived and the values that stay on the rank; F reads
its input and writes residuals; the head replaces the last stage's y by its gradient; R reads what F
kept and writes residuals; the gradient action reads residuals and output gradient and writes the W
stash.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.lanes import (
    Lane,
    Message,
    PermutePairs,
    assign_lanes,
    list_messages,
    list_permute_pairs,
    message_direction,
)
from jaxpipe.core.schedule.lifetimes import (
    Buffers,
    SlotKey,
    action_key,
    assign_slots,
    live_intervals,
    sequence_key,
)
from jaxpipe.core.schedule.lockstep import PLAIN, Lockstep
from jaxpipe.core.schedule.pairs import OverlapPair, list_overlap_pairs, overlap_pair
from jaxpipe.core.schedule.placing import Grid, place, place_cells
from jaxpipe.core.schedule.row import StepColumns, TableRow, unused_columns
from jaxpipe.core.schedule.scan import update_ticks, validation_ticks
from jaxpipe.core.schedule.vocab_parallel import stage_ranks, vocab_parallel_columns

SlotOf = Buffers[Mapping[Hashable, int]]  # slots on one rank, by owner or by reading action
Position = tuple[int, int]  # tick, rank


@dataclass(frozen=True)
class Tables:
    """A schedule as the scan reads it, and the lengths of the ring buffers its columns index.

    Attributes:
      columns: what every rank does in every tick; read-only int32 arrays `[T, P]`.
      slots: length of every ring buffer, without the dummy slot; `rank_slots`: slots each rank
        uses.
      lanes: the messages that a permute carries in every tick.
      permute_pairs: by phase (`phases`) and hop, the permute pairs; a rank waits only for the ranks
        that it forms a permute pair with.
      pairs: the entries that the column `pair` indexes.
      lockstep: the options with which the schedule was placed into ticks.
      first_ranks, last_ranks: ranks that compute the first or last stage; two if bidirectional.
    """

    columns: TableRow[np.ndarray]
    slots: Buffers[int]
    rank_slots: tuple[Buffers[int], ...]
    lanes: tuple[Lane, ...]
    permute_pairs: tuple[PermutePairs, ...]
    pairs: tuple[OverlapPair, ...]
    lockstep: Lockstep
    first_ranks: tuple[int, ...]
    last_ranks: tuple[int, ...]

    @property
    def ticks(self) -> int:
        """Number of ticks T; every column is `[T, P]`."""
        return len(self.columns.F)

    @property
    def has_gradients(self) -> bool:
        """Whether the schedule computes gradients."""
        return bool(self.slots.for_b or self.slots.for_w)

    @property
    def forwards(self) -> list[int]:
        """The chunks whose F some cell runs outside `pairs`."""
        return self._chunks_with(Op.F)

    @property
    def gradients(self) -> list[tuple[Op, int]]:
        """The `(op, chunk)` of every gradient action that some cell runs outside `pairs`."""
        return [(op, chunk) for op in (Op.B, Op.BW, Op.W) for chunk in self._chunks_with(op)]

    @property
    def has_split_backward(self) -> bool:
        """Whether some backward is split into B and W."""
        return bool(self.slots.stash)

    @property
    def recomputations(self) -> list[int]:
        """The chunks whose R some cell runs; not empty where R writes the residuals, not F."""
        columns = self.columns.recompute
        return [] if columns is None else _chunks_in(columns.chunk)

    def uses_inbox(self, column: np.ndarray) -> bool:
        """Return whether any cell uses a given column of inbox slots."""
        return bool((column < self.slots.inbox).any())

    def _chunks_with(self, op: Op) -> list[int]:
        return _chunks_in(self.columns.chunk_column(op))


def _chunks_in(column: np.ndarray) -> list[int]:
    """Return the chunks that a column names, in which 1 + the chunk is to run."""
    return [value - 1 for value in np.unique(column).tolist() if value]


def build_grid(schedule: Schedule, lockstep: Lockstep) -> Grid:
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
    on neighbouring ranks, for a schedule with R whose cells become pairs, and for the errors of
    `place`.

    >>> from jaxpipe.core.schedule import one_f_one_b
    >>> columns = lower(one_f_one_b(pp=2, microbatches=2)).columns
    >>> columns.forward_mb.T.tolist(), columns.BW.T.tolist()
    ([[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], [[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0]])
    """
    grid = build_grid(schedule, lockstep)
    inputs = list_messages(schedule, grid, lockstep.transfer_ticks)
    intervals = live_intervals(schedule, grid, inputs, lockstep)
    slot_of = [Buffers(*(assign_slots(b.items()) for b in buffers)) for buffers in intervals]
    used = tuple(
        Buffers(*(1 + max(slots.values(), default=-1) for slots in buffers)) for buffers in slot_of
    )
    slots = Buffers(*map(max, zip(*used)))
    lanes = assign_lanes(schedule, list(inputs.values()))
    placed = place_cells(schedule, lockstep)
    pairs = list_overlap_pairs(schedule.placement, placed.examples) if lockstep.pairs else ()
    if pairs and schedule.recomputes:
        raise ScheduleError(
            f"{schedule.name} has R and cells whose F and gradient action share a branch, which "
            f"reads residuals before any R can write them: use pairs=False."
        )
    vocab_parallel = None
    if lockstep.vocab_parallel:
        vocab_parallel = vocab_parallel_columns(schedule, grid, slot_of, dummy=slots.inbox)
    steps = _step_columns(schedule, grid, lockstep) if schedule.updates else None
    columns = unused_columns((len(grid), schedule.pp), slots, len(lanes), vocab_parallel, steps)
    for tick, row in enumerate(grid):
        columns.phase[tick] = tick % lockstep.phases
        for rank, cell in enumerate(row):
            at = tick, rank
            _fill_ops(columns, at, cell, schedule.placement, pairs)
            for action in cell.actions:
                if fill := _FILL.get(action.op):
                    fill(columns, at, action, schedule, slot_of[rank])
                if action in inputs and inputs[action].stored_tick is None:
                    columns.dy_of_head[at] = 1
    for action, message in inputs.items():
        if message.stored_tick is not None:
            slot = slot_of[message.receiver].inbox[action]
            _fill_message(columns, message, slot, schedule, lanes)
    if steps is not None:
        _fill_first_embeddings(steps, columns.embed_gradient)
    for leaf in _column_arrays(columns):
        leaf.setflags(write=False)
    first, last = (stage_ranks(stage, schedule) for stage in (0, schedule.stages - 1))
    routes = list_permute_pairs(schedule, lockstep.phases)
    return Tables(columns, slots, used, lanes, routes, pairs, lockstep, first, last)


def _step_columns(schedule: Schedule, grid: Grid, lockstep: Lockstep) -> StepColumns[np.ndarray]:
    """Flag step ends and starts, and the ticks in which all ranks validate a step."""
    ends, validate = np.zeros((2, len(grid), schedule.pp), np.int32)
    ends[update_ticks(schedule, grid), np.arange(schedule.pp)] = 1
    validate[validation_ticks(schedule, grid, lockstep)] = 1
    begins = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    return StepColumns(ends, begins, np.zeros_like(ends), validate)


def _fill_first_embeddings(steps: StepColumns[np.ndarray], embed_gradient: np.ndarray) -> None:
    """Flag the first embedding gradient of every rank and step."""
    steps_complete = steps.step_complete.cumsum(axis=0) - steps.step_complete
    for rank, of_rank in enumerate(embed_gradient.T):
        (ticks,) = np.nonzero(of_rank)
        _, first = np.unique(steps_complete[ticks, rank], return_index=True)
        steps.first_embed_gradient[ticks[first], rank] = 1


def _column_arrays(columns: tuple) -> list[np.ndarray]:
    """Return the arrays of all columns, including those in nested tuples."""
    nested = [_column_arrays(c) if isinstance(c, tuple) else [c] for c in columns if c is not None]
    return [leaf for leaves in nested for leaf in leaves]


def _fill_ops(
    columns: TableRow[np.ndarray],
    at: Position,
    cell: Cell,
    placement: Placement,
    pairs: tuple[OverlapPair, ...],
) -> None:
    """Fill the ops of a cell: one pair, or each action by itself."""
    pair = overlap_pair(cell, placement)
    if pair in pairs:
        columns.pair[at] = 1 + pairs.index(pair)
        return
    for op, stage, m in filter(None, (cell.forward, cell.gradient)):
        columns.chunk_column(op)[at] = 1 + placement.chunk(stage, m)


def _write_slot(
    column: np.ndarray, at: Position, slots: Mapping[Hashable, int], key: Hashable
) -> None:
    """Write the slot of a key into a column, if the key has one."""
    if key in slots:
        column[at] = slots[key]


def _fill_forward(
    columns: TableRow[np.ndarray], at: Position, action: Action, schedule: Schedule, slot_of: SlotOf
) -> None:
    """Fill the slots that an F reads and writes."""
    _, stage, m = action
    key = action_key(action)
    columns.forward_mb[at] = m
    columns.first_slice[at] = m % schedule.slices == 0
    if columns.vocab_parallel is None:
        columns.embed[at] = stage == 0
        columns.head[at] = stage == schedule.stages - 1
    _write_slot(columns.x_read, at, slot_of.inbox, action)
    if columns.recompute is None:
        _write_residuals(columns, at, key, slot_of)
    else:
        columns.recompute.for_r_write[at] = slot_of.for_r[key]
    _write_slot(columns.head_write, at, slot_of.head, key)
    if schedule.slices > 1:
        _write_slot(columns.state, at, slot_of.state, sequence_key(action, schedule))


def _fill_recompute(
    columns: TableRow[np.ndarray], at: Position, action: Action, schedule: Schedule, slot_of: SlotOf
) -> None:
    """Fill the slots that an R reads and writes."""
    key, own = action_key(action), columns.recompute
    assert own is not None
    own.chunk[at] = 1 + schedule.placement.chunk(*key)
    own.microbatch[at] = action.microbatch
    own.for_r_read[at] = slot_of.for_r[key]
    _write_residuals(columns, at, key, slot_of)


def _write_residuals(
    columns: TableRow[np.ndarray], at: Position, key: SlotKey, slot_of: SlotOf
) -> None:
    """Write the slots of residuals for B and W, which F computes or, if there is one, R."""
    _write_slot(columns.for_b_write, at, slot_of.for_b, key)
    _write_slot(columns.for_w_write, at, slot_of.for_w, key)


def _fill_gradient(
    columns: TableRow[np.ndarray], at: Position, action: Action, schedule: Schedule, slot_of: SlotOf
) -> None:
    """Fill the slots that a B, W or BW reads and writes."""
    op, stage, m = action
    key = action_key(action)
    columns.gradient_mb[at] = m
    columns.last_slice[at] = (m + 1) % schedule.slices == 0
    _write_slot(columns.for_w_read, at, slot_of.for_w, key)
    if op.computes_dx:
        _write_slot(columns.dy_read, at, slot_of.inbox, action)
        _write_slot(columns.for_b_read, at, slot_of.for_b, key)
        _write_slot(columns.dx_write, at, slot_of.embed, key)
        if schedule.slices > 1:
            sequence = sequence_key(action, schedule)
            _write_slot(columns.state_read, at, slot_of.state, sequence)
            _write_slot(columns.dstate, at, slot_of.dstate, sequence)
    if op.computes_dw:
        columns.head_weight[at] = key in slot_of.head
        _write_slot(columns.head_read, at, slot_of.head, key)
        _write_slot(columns.dx_read, at, slot_of.embed, key)
    if op is Op.B:
        _write_slot(columns.stash_write, at, slot_of.stash, key)
    if op is Op.W:
        _write_slot(columns.stash_read, at, slot_of.stash, key)
    if columns.vocab_parallel is None and stage == 0:
        is_deferred = key in slot_of.embed  # the embedding's gradient is deferred to W
        columns.embed_gradient[at] = op.computes_dw if is_deferred else op.computes_dx


_FILL = {Op.F: _fill_forward, Op.R: _fill_recompute} | dict.fromkeys(
    (Op.B, Op.W, Op.BW), _fill_gradient
)


def _fill_message(
    columns: TableRow[np.ndarray],
    message: Message,
    slot: int,
    schedule: Schedule,
    lanes: tuple[Lane, ...],
) -> None:
    """Fill the slot that stores a message, and the lane that sends it."""
    kind, stage, _ = message.value
    if columns.vocab_parallel is not None and (kind, stage) == ("y", schedule.stages - 1):
        column = columns.vocab_parallel.dy_write
    elif message.sender == message.receiver:
        column = columns.keep_y if kind == "y" else columns.keep_dx
    else:
        hop = message_direction(message, schedule)
        index = next(i for i, lane in enumerate(lanes) if lane.hop == hop and kind in lane.kinds)
        columns.send[index][message.computed_tick + 1, message.sender] = 1 + lanes[
            index
        ].kinds.index(kind)
        column = columns.arrive[index]
    column[message.stored_tick, message.receiver] = slot
