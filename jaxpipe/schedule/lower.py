"""Lower a schedule to the integer tables that the scan reads, with buffer slots by liveness.

A tick of the executor runs in this order, which is also what makes two uses of a slot collide:
store what arrived or was kept; F reads its input and writes residuals; the head turns the last
stage's y into its gradient; the gradient action reads residuals and output gradient and writes a
stash.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError
from jaxpipe.schedule.cells import Grid, place
from jaxpipe.schedule.ends import ranks_of, shared_end_columns
from jaxpipe.schedule.lanes import Lane, Message, assign_lanes, hop_of, messages
from jaxpipe.schedule.lifetimes import Slots, colour, lifetimes, sequence_of


class Pair(NamedTuple):
    """An F and a gradient of different chunks in one cell: two halves that may overlap."""

    forward: int
    op: Op
    gradient: int


@dataclass(frozen=True)
class Tables:
    """One integer per (tick, rank) and column, and the sizes of the buffers they point into.

    Columns hold 0, slot columns the size of their buffer (an index behind its last slot), in
    cells that do not use them. `F`, `B`, `W`, `BW`: 1 + the chunk whose action this is. `pair`: 1 +
    an index into `pairs`; those four are then 0.

    F takes microbatch `forward_mb` and slot `x_read` of the inbox, or the embedding where `embed`;
    its residuals go to `for_b_write` and `for_w_write`. Where `head`, the loss follows and leaves
    the output gradient in place of y. A gradient takes `gradient_mb`, `dy_read` (or what the head
    has just left, where `dy_of_head`), `for_b_read`, `for_w_read`, `stash_write`, `stash_read`.
    Where `embed_gradient`, the embedding's gradient follows: after the dx of stage 0, or, deferred,
    after its W. Deferred, B or BW leaves the dx in `dx_write`, and it is taken from `dx_read`; the
    loss leaves in `head_write` what the head's own W takes from `head_read`, where `head_weight`.
    Where sequences are sliced, F reads and writes `state`, and B and BW read `state_read`, and read
    and write `dstate`; where `first_slice`, or `last_slice`, they begin with zeros instead.

    `send_i` is 1 + which of the kinds of `lanes[i]` is sent, 0 where nobody waits for what this
    rank made last; what arrives is stored in `arrive_i`. `keep_y` and `keep_dx`: where to store
    what this rank made last and reads itself.

    With `vocab_parallel` all ranks compute the ends together, at the start of a tick, and these
    columns have the same value on each: 1 + the microbatch, 0 for none, of rank r in `first_ranks`
    or `last_ranks`. `embed_r`: its embedding, stored on rank r in `embed_write` like a message;
    `head_r`: the loss of the y that rank r made last, whose gradient it stores in `dy_write`;
    `embed_gradient_r`: of the dx that rank r made last. The columns of one rank's ends are then 0.
    """

    columns: dict[str, np.ndarray]
    slots: Slots
    slots_of: tuple[Slots, ...]  # used by each rank
    lanes: tuple[Lane, ...]
    pairs: tuple[Pair, ...]
    transfer_ticks: int
    first_ranks: tuple[int, ...]  # the ranks that have a first stage: two if bidirectional
    last_ranks: tuple[int, ...]
    vocab_parallel: bool

    @property
    def ticks(self) -> int:
        """Number of ticks T; every column is `[T, P]`."""
        return len(self.columns["F"])

    @property
    def trains(self) -> bool:
        """Whether any gradient is computed."""
        return bool(self.pairs or self.gradients)

    @property
    def forwards(self) -> list[int]:
        """The chunks that some cell runs F of, outside pairs."""
        return self._chunks_of(Op.F)

    @property
    def gradients(self) -> list[tuple[Op, int]]:
        """The `(op, chunk)` that some cell runs, outside pairs."""
        return [(op, chunk) for op in (Op.B, Op.BW, Op.W) for chunk in self._chunks_of(op)]

    @property
    def splits(self) -> bool:
        """Whether some gradient is split into B and W."""
        return bool(self.slots.stash)

    def stores(self, column: str) -> bool:
        """Whether any cell uses a column of inbox slots."""
        return bool((self.columns[column] < self.slots.inbox).any())

    def _chunks_of(self, op: Op) -> list[int]:
        return [value - 1 for value in np.unique(self.columns[op.name]).tolist() if value]


def lower(
    schedule: Schedule,
    *,
    transfer_ticks: int = 1,
    in_flight: int | None = None,
    defer_ends: bool = False,
    vocab_parallel: bool = False,
    pairs: bool = True,
) -> Tables:
    """Tables of any schedule in which stages that follow each other are on neighbouring ranks.

    `transfer_ticks` and `in_flight` are explained at `cells.place`. `defer_ends` lets the gradients
    of the embedding's and the head's own matrices wait for W of their stages. `vocab_parallel` has
    all ranks compute both ends, each a part of the vocabulary. Without `pairs`, the two halves of a
    cell are always two actions in a row. Raises `ScheduleError` for other placements, for both ends
    deferred and shared at once, and what `place` raises.

    >>> from jaxpipe.schedule import build
    >>> tables = lower(build("1f1b", pp=2, microbatches=2))
    >>> tables.columns["forward_mb"].T.tolist(), tables.columns["BW"].T.tolist()
    ([[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], [[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0]])
    """
    if vocab_parallel and defer_ends:
        raise ScheduleError(
            "vocab_parallel with defer_ends: ends that all ranks share leave nothing to even out "
            "by waiting; use one of them."
        )
    grid = place(
        schedule,
        transfer_ticks=transfer_ticks,
        in_flight=in_flight,
        vocab_parallel=vocab_parallel,
    )
    inputs = messages(schedule, grid, transfer_ticks)
    if vocab_parallel:
        grid += ((Cell(),) * schedule.pp,)  # for what the ends take from the last tick
    alive = lifetimes(schedule, grid, inputs, defer_ends, vocab_parallel)
    coloured = [[colour(intervals.items()) for intervals in ranks] for ranks in alive]
    used = [[1 + max(slots.values(), default=-1) for slots in ranks] for ranks in coloured]
    slot_of = Slots(*({k: v for slots in ranks for k, v in slots.items()} for ranks in coloured))
    slots = Slots(*map(max, used))
    lanes = assign_lanes(schedule, list(inputs.values()))
    joined = _pairs(schedule.placement, grid) if pairs else ()

    columns = _empty_columns((len(grid), schedule.pp), slots, lanes)
    for tick, row in enumerate(grid):
        for rank, cell in enumerate(row):
            values = _cell_columns(cell, schedule, joined, inputs, slot_of, not vocab_parallel)
            for name, value in values.items():
                columns[name][tick, rank] = value
    if vocab_parallel:
        columns |= shared_end_columns(schedule, grid, slot_of.inbox, spare=slots.inbox)
    for action, message in inputs.items():
        if message.stored is None:
            continue
        kind = message.value.kind
        if vocab_parallel and message.value[:2] == ("y", schedule.stages - 1):
            name = "dy_write"
        elif message.sender == message.receiver:
            name = f"keep_{kind}"
        else:
            hop = hop_of(message, schedule)
            index = next(
                i for i, lane in enumerate(lanes) if lane.hop == hop and kind in lane.kinds
            )
            name = f"arrive_{index}"
            sent = 1 + lanes[index].kinds.index(kind)
            columns[f"send_{index}"][message.made + 1, message.sender] = sent
        columns[name][message.stored, message.receiver] = slot_of.inbox[action]
    used_of = tuple(Slots(*u) for u in zip(*used))
    first, last = (ranks_of(stage, schedule) for stage in (0, schedule.stages - 1))
    return Tables(
        columns, slots, used_of, lanes, joined, transfer_ticks, first, last, vocab_parallel
    )


def _pairs(placement: Placement, grid: Grid) -> tuple[Pair, ...]:
    cells = {cell for row in grid for cell in row}
    return tuple(sorted({pair for cell in cells if (pair := _pair_of(cell, placement))}, key=str))


def _pair_of(cell: Cell, placement: Placement) -> Pair | None:
    """The pair that a cell is, if its halves cannot depend on each other."""
    if not (cell.forward and cell.gradient):
        return None
    forward, gradient = (placement.chunk(a.stage, a.microbatch) for a in cell.actions)
    return Pair(forward, cell.gradient.op, gradient) if forward != gradient else None


def _empty_columns(
    shape: tuple[int, int], slots: Slots, lanes: tuple[Lane, ...]
) -> dict[str, np.ndarray]:
    flags = ["F", "B", "W", "BW", "pair", "forward_mb", "gradient_mb"]
    flags += ["embed", "head", "head_weight", "embed_gradient", "dy_of_head"]
    flags += ["first_slice", "last_slice"]
    flags += [f"send_{i}" for i in range(len(lanes))]
    columns = {name: np.zeros(shape, np.int32) for name in flags}
    messages = [
        "x_read",
        "dy_read",
        "keep_y",
        "keep_dx",
        *(f"arrive_{i}" for i in range(len(lanes))),
    ]
    for names, spare in (
        (messages, slots.inbox),
        (("for_b_write", "for_b_read"), slots.for_b),
        (("for_w_write", "for_w_read"), slots.for_w),
        (("stash_write", "stash_read"), slots.stash),
        (("head_write", "head_read"), slots.head),
        (("dx_write", "dx_read"), slots.embed),
        (("state", "state_read"), slots.state),
        (("dstate",), slots.dstate),
    ):
        columns |= {name: np.full(shape, spare, np.int32) for name in names}
    return columns


_SLOT_COLUMNS = {
    Op.F: (
        ("for_b", "for_b_write"), ("for_w", "for_w_write"), ("head", "head_write"),
        ("state", "state"),
    ),
    Op.B: (
        ("for_b", "for_b_read"), ("for_w", "for_w_read"), ("stash", "stash_write"),
        ("embed", "dx_write"), ("state", "state_read"), ("dstate", "dstate"),
    ),
    Op.W: (
        ("for_w", "for_w_read"), ("stash", "stash_read"), ("head", "head_read"),
        ("embed", "dx_read"),
    ),
    Op.BW: (
        ("for_b", "for_b_read"), ("for_w", "for_w_read"), ("head", "head_read"),
        ("embed", "dx_write"), ("embed", "dx_read"), ("state", "state_read"), ("dstate", "dstate"),
    ),
}  # fmt: skip


def _cell_columns(
    cell: Cell,
    schedule: Schedule,
    pairs: tuple[Pair, ...],
    inputs: dict[Action, Message],
    slot_of: Slots,
    own_ends: bool,
) -> dict[str, int]:
    """What the actions of a cell put into its columns; `own_ends`: those of the ends among them."""
    placement, last = schedule.placement, schedule.stages - 1
    values: dict[str, int] = {}
    pair = _pair_of(cell, placement)
    if pair in pairs:
        values["pair"] = 1 + pairs.index(pair)
    for action in cell.actions:
        op, stage, m = action
        if pair not in pairs:
            values[op.name] = 1 + placement.chunk(stage, m)
        key = action._replace(op=Op.F)
        if op is Op.F:
            values |= {
                "forward_mb": m,
                "embed": own_ends and stage == 0,
                "head": own_ends and stage == last,
                "first_slice": m % schedule.slices == 0,
            }
        else:
            values["gradient_mb"] = m
            values["last_slice"] = (m + 1) % schedule.slices == 0
            values["head_weight"] = key in slot_of.head and op is not Op.B
            after = Op.B if key in slot_of.embed else Op.W  # the one that it does not follow
            values["embed_gradient"] = own_ends and stage == 0 and op is not after
        if action in slot_of.inbox:
            values["x_read" if op is Op.F else "dy_read"] = slot_of.inbox[action]
        elif action in inputs:
            values["dy_of_head"] = 1
        sequence = key._replace(microbatch=sequence_of(action, schedule))
        for buffer, name in _SLOT_COLUMNS[op]:
            slots = getattr(slot_of, buffer)
            of = sequence if "state" in buffer else key
            if of in slots:
                values[name] = slots[of]
    return values
