"""The columns of the tables that the scan reads: one row per tick, one value per rank.

`Tables` contains a `Row` of numpy arrays `[T, P]`; a tick on one rank reads a `Row` of scalars.
Both are pytrees, because named tuples are.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxpipe.schedule.action import Op
from jaxpipe.schedule.lifetimes import Buffers

Leaf = TypeVar("Leaf")


class EndColumns(NamedTuple, Generic[Leaf]):
    """Columns of the vocabulary-parallel embedding and head, at the start of a tick.

    All ranks compute them together. `head[k]` serves rank `last_ranks[k]` of the tables, `embed[k]`
    and `embed_gradient[k]` serve rank `first_ranks[k]`. Each is 1 + the microbatch, or 0 for none,
    and has the same value on every rank.
    """

    embed: tuple[Leaf, ...]
    """Compute the embedding of this microbatch; rank `first_ranks[k]` stores it."""
    head: tuple[Leaf, ...]
    """Compute the loss of the last y of rank `last_ranks[k]`, which stores the gradient."""
    embed_gradient: tuple[Leaf, ...]
    """Compute the embedding's gradient from the last dx of rank `first_ranks[k]`."""
    embed_write: Leaf
    """Inbox slot for the embedding, on the rank that reads it."""
    dy_write: Leaf
    """Inbox slot for the gradient of y, on the rank that computed y."""


class StepColumns(NamedTuple, Generic[Leaf]):
    """Boundaries of fused steps, which every rank reaches in a different tick."""

    ends: Leaf
    """Flag: the rank's gradient sums are complete for this step, and its update follows."""
    begins: Leaf
    """Flag: gradient sums restart from zero; set in the tick after an update."""
    embeds: Leaf
    """Flag: this is the rank's first embedding gradient of the step."""


class Row(NamedTuple, Generic[Leaf]):
    """One integer per column, for each tick and rank.

    In a cell that does not use a column, the column is 0; a slot column is then the length of its
    ring buffer, an index past its last slot (in the inbox, the dummy slot). Flags are 0 or 1. Slots
    index the ring buffers of `Buffers`.
    """

    F: Leaf
    """1 + the chunk to run F of."""
    B: Leaf
    """1 + the chunk to run B of."""
    W: Leaf
    """1 + the chunk to run W of."""
    BW: Leaf
    """1 + the chunk to run BW of."""
    pair: Leaf
    """1 + an index into `Tables.pairs`; the four columns above are then 0."""
    forward_mb: Leaf
    """Microbatch of F."""
    gradient_mb: Leaf
    """Microbatch of B, W or BW."""

    embed: Leaf
    """Flag: the input of F is the embedding of its microbatch, not `x_read`."""
    head: Leaf
    """Flag: head and loss run after F, and the output gradient replaces y."""
    head_weight: Leaf
    """Flag: compute the deferred gradients of the head's weight matrices."""
    embed_gradient: Leaf
    """Flag: compute the embedding's gradient from the new dx or, if deferred, from `dx_read`."""
    dy_of_head: Leaf
    """Flag: the gradient action reads the head's latest output gradient, not `dy_read`."""
    first_slice: Leaf
    """Flag: F belongs to a sequence's first slice and reads zeros, not `state`."""
    last_slice: Leaf
    """Flag: B or BW belongs to a sequence's last slice and reads zeros, not `dstate`."""

    x_read: Leaf
    """Inbox slot that F reads."""
    dy_read: Leaf
    """Inbox slot that B or BW reads."""
    keep_y: Leaf
    """Inbox slot for this rank's latest y, where this rank reads it itself."""
    keep_dx: Leaf
    """Inbox slot for this rank's latest dx, where this rank reads it itself."""
    turn: Leaf
    """Phase of the permutes, an index into `Tables.routes`; the same value on every rank."""
    arrive: tuple[Leaf, ...]
    """Per lane: inbox slot for the arriving message."""
    send: tuple[Leaf, ...]
    """Per lane: 1 + the index of the kind to send; 0 where no rank reads the latest results."""

    for_b_write: Leaf
    """Slot where F writes the residuals for B."""
    for_b_read: Leaf
    """Slot where B and BW read those residuals."""
    for_w_write: Leaf
    """Slot where F writes the residuals for W."""
    for_w_read: Leaf
    """Slot where B, W and BW read those residuals."""
    stash_write: Leaf
    """W stash slot that B writes."""
    stash_read: Leaf
    """W stash slot that W reads."""
    head_write: Leaf
    """Slot where the loss writes the inputs of `head_weight`."""
    head_read: Leaf
    """Slot where `head_weight` reads its inputs."""
    dx_write: Leaf
    """Slot for the dx of stage 0, where the embedding's gradient is deferred."""
    dx_read: Leaf
    """Slot of the dx that a deferred `embed_gradient` reads."""
    state: Leaf
    """Slot of the state that the slices of a sequence share; F reads and writes it."""
    state_read: Leaf
    """Slot of the state that the slices of a sequence share; B and BW read it."""
    dstate: Leaf
    """Slot of the gradient of that state; B and BW read and write it."""

    ends: EndColumns[Leaf] | None
    """None where the ranks of the first and last stages compute embedding and head alone."""
    steps: StepColumns[Leaf] | None
    """None for a single step, whose update is not part of the schedule."""
    tick: Leaf | None = None
    """Number of the tick, where messages are printed; None in tables."""

    def chunk_of(self, op: Op) -> Leaf:
        """Return the column of an op: 1 + the chunk to run, without `Tables.pairs`.

        >>> from jaxpipe.schedule import build, lower
        >>> lower(build("1f1b", pp=1, microbatches=2)).columns.chunk_of(Op.BW).T.tolist()
        [[0, 1, 0, 1]]
        """
        return getattr(self, op.name)


def unused_columns(
    shape: tuple[int, int],
    slots: Buffers[int],
    lanes: int,
    ends: EndColumns[np.ndarray] | None,
    steps: StepColumns[np.ndarray] | None,
) -> Row[np.ndarray]:
    """Return columns of a shape `[T, P]` in which no cell uses anything yet."""

    def unused(spare: int = 0) -> np.ndarray:
        return np.full(shape, spare, np.int32)

    inbox = slots.inbox
    return Row(
        F=unused(), B=unused(), W=unused(), BW=unused(), pair=unused(),
        forward_mb=unused(), gradient_mb=unused(),
        embed=unused(), head=unused(), head_weight=unused(), embed_gradient=unused(),
        dy_of_head=unused(), first_slice=unused(), last_slice=unused(),
        x_read=unused(inbox), dy_read=unused(inbox), keep_y=unused(inbox), keep_dx=unused(inbox),
        turn=unused(),
        arrive=tuple(unused(inbox) for _ in range(lanes)),
        send=tuple(unused() for _ in range(lanes)),
        for_b_write=unused(slots.for_b), for_b_read=unused(slots.for_b),
        for_w_write=unused(slots.for_w), for_w_read=unused(slots.for_w),
        stash_write=unused(slots.stash), stash_read=unused(slots.stash),
        head_write=unused(slots.head), head_read=unused(slots.head),
        dx_write=unused(slots.embed), dx_read=unused(slots.embed),
        state=unused(slots.state), state_read=unused(slots.state), dstate=unused(slots.dstate),
        ends=ends,
        steps=steps,
    )  # fmt: skip
