"""The columns of the tables that the scan reads: one row per tick, one value per rank.

`Tables` contains a `TableRow` of numpy arrays `[T, P]`; a tick on one rank reads a `TableRow` of
scalars. Both are pytrees, because named tuples are.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxpipe.core.schedule.action import Op
from jaxpipe.core.schedule.lifetimes import Buffers

Column = TypeVar("Column")


class VocabParallelColumns(NamedTuple, Generic[Column]):
    """Columns of the vocabulary-parallel embedding and head, at the start of a tick.

    All ranks compute them together. `head[k]` serves rank `last_ranks[k]` of the tables, `embed[k]`
    and `embed_gradient[k]` serve rank `first_ranks[k]`. Each is 1 + the microbatch, or 0 for none,
    and has the same value on every rank.
    """

    embed: tuple[Column, ...]
    """Compute the embedding of this microbatch; rank `first_ranks[k]` stores it."""
    head: tuple[Column, ...]
    """Compute the loss of the last y of rank `last_ranks[k]`, which stores the gradient."""
    embed_gradient: tuple[Column, ...]
    """Compute the embedding's gradient from the last dx of rank `first_ranks[k]`."""
    embed_write: Column
    """Inbox slot for the embedding, on the rank that reads it."""
    dy_write: Column
    """Inbox slot for the gradient of y, on the rank that computed y."""


class StepColumns(NamedTuple, Generic[Column]):
    """Boundaries of fused steps, which every rank reaches in a different tick."""

    step_complete: Column
    """Flag: the rank's gradient sums are complete for this step, and its update follows."""
    step_restart: Column
    """Flag: gradient sums restart from zero; set in the tick after an update."""
    first_embed_gradient: Column
    """Flag: this is the rank's first embedding gradient of the step."""
    validate: Column
    """Flag: the oldest step not yet validated is complete on all ranks; the same on every rank."""


class RecomputeColumns(NamedTuple, Generic[Column]):
    """Columns of R, the recomputation of residuals ahead of B."""

    chunk: Column
    """1 + the chunk to run R of."""
    microbatch: Column
    """Microbatch of R."""
    for_r_write: Column
    """Slot where F writes what R recomputes the residuals from; F writes no residuals then."""
    for_r_read: Column
    """Slot where R reads that."""


class TableRow(NamedTuple, Generic[Column]):
    """One integer per column, for each tick and rank.

    In a cell that does not use a column, the column is 0; a slot column is then the length of its
    ring buffer, an index past its last slot (in the inbox, the dummy slot). Flags are 0 or 1. Slots
    index the ring buffers of `Buffers`.
    """

    F: Column
    """1 + the chunk to run F of."""
    B: Column
    """1 + the chunk to run B of."""
    W: Column
    """1 + the chunk to run W of."""
    BW: Column
    """1 + the chunk to run BW of."""
    pair: Column
    """1 + an index into `Tables.pairs`; the columns F, B, W and BW are then 0."""
    forward_mb: Column
    """Microbatch of F."""
    gradient_mb: Column
    """Microbatch of B, W or BW."""

    embed: Column
    """Flag: the input of F is the embedding of its microbatch, not `x_read`."""
    head: Column
    """Flag: head and loss run after F, and the output gradient replaces y."""
    head_weight: Column
    """Flag: compute the deferred gradients of the head's weight matrices."""
    embed_gradient: Column
    """Flag: compute the embedding's gradient from the new dx or, if deferred, from `dx_read`."""
    dy_of_head: Column
    """Flag: the gradient action reads the head's latest output gradient, not `dy_read`."""
    first_slice: Column
    """Flag: F belongs to a sequence's first slice and reads zeros, not `state`."""
    last_slice: Column
    """Flag: B or BW belongs to a sequence's last slice and reads zeros, not `dstate`."""

    x_read: Column
    """Inbox slot that F reads."""
    dy_read: Column
    """Inbox slot that B or BW reads."""
    keep_y: Column
    """Inbox slot for this rank's latest y, where this rank reads it itself."""
    keep_dx: Column
    """Inbox slot for this rank's latest dx, where this rank reads it itself."""
    phase: Column
    """Phase of the permutes, an index into `Tables.permute_pairs`; the same value on every rank."""
    arrive: tuple[Column, ...]
    """Per lane: inbox slot for the arriving message."""
    send: tuple[Column, ...]
    """Per lane: 1 + the index of the kind to send; 0 where no rank reads the latest results."""

    for_b_write: Column
    """Slot where F (or R, if there is one) writes the residuals for B."""
    for_b_read: Column
    """Slot where B and BW read those residuals."""
    for_w_write: Column
    """Slot where F (or R) writes the residuals for W."""
    for_w_read: Column
    """Slot where B, W and BW read those residuals."""
    stash_write: Column
    """W stash slot that B writes."""
    stash_read: Column
    """W stash slot that W reads."""
    head_write: Column
    """Slot where the loss writes the inputs of `head_weight`."""
    head_read: Column
    """Slot where `head_weight` reads its inputs."""
    dx_write: Column
    """Slot for the dx of stage 0, where the embedding's gradient is deferred."""
    dx_read: Column
    """Slot of the dx that a deferred `embed_gradient` reads."""
    state: Column
    """Slot of the state that the slices of a sequence share; F reads and writes it."""
    state_read: Column
    """Slot of the state that the slices of a sequence share; B and BW read it."""
    dstate: Column
    """Slot of the gradient of that state; B and BW read and write it."""

    vocab_parallel: VocabParallelColumns[Column] | None
    """None where the ranks of the first and last stages compute embedding and head alone."""
    steps: StepColumns[Column] | None
    """None for a single step, whose update is not part of the schedule."""
    recompute: RecomputeColumns[Column] | None
    """None where F writes the residuals."""
    tick: Column | None = None
    """Number of the tick, where messages are printed; None in tables."""

    def chunk_column(self, op: Op) -> Column:
        """Return the column of an op: 1 + the chunk to run, without `Tables.pairs`.

        >>> from jaxpipe.core.schedule import one_f_one_b
        >>> from jaxpipe.core.schedule import lower
        >>> lower(one_f_one_b(pp=1, microbatches=2)).columns.chunk_column(Op.BW).T.tolist()
        [[0, 1, 0, 1]]
        """
        return getattr(self, op.name)


def unused_columns(
    shape: tuple[int, int],
    slots: Buffers[int],
    lanes: int,
    vocab_parallel: VocabParallelColumns[np.ndarray] | None,
    steps: StepColumns[np.ndarray] | None,
) -> TableRow[np.ndarray]:
    """Return columns of a shape `[T, P]` in which no cell uses anything yet."""

    def unused(spare: int = 0) -> np.ndarray:
        return np.full(shape, spare, np.int32)

    inbox = slots.inbox
    return TableRow(
        F=unused(), B=unused(), W=unused(), BW=unused(), pair=unused(),
        forward_mb=unused(), gradient_mb=unused(),
        embed=unused(), head=unused(), head_weight=unused(), embed_gradient=unused(),
        dy_of_head=unused(), first_slice=unused(), last_slice=unused(),
        x_read=unused(inbox), dy_read=unused(inbox), keep_y=unused(inbox), keep_dx=unused(inbox),
        phase=unused(),
        arrive=tuple(unused(inbox) for _ in range(lanes)),
        send=tuple(unused() for _ in range(lanes)),
        for_b_write=unused(slots.for_b), for_b_read=unused(slots.for_b),
        for_w_write=unused(slots.for_w), for_w_read=unused(slots.for_w),
        stash_write=unused(slots.stash), stash_read=unused(slots.stash),
        head_write=unused(slots.head), head_read=unused(slots.head),
        dx_write=unused(slots.embed), dx_read=unused(slots.embed),
        state=unused(slots.state), state_read=unused(slots.state), dstate=unused(slots.dstate),
        vocab_parallel=vocab_parallel,
        steps=steps,
        recompute=RecomputeColumns(
            unused(), unused(), unused(slots.for_r), unused(slots.for_r)
        ) if slots.for_r else None,
    )  # fmt: skip
