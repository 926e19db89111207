"""The columns of the tables that the scan reads: one row a tick, one value a rank.

`Tables` hold a `Row` of numpy arrays `[T, P]`; a tick on one rank gets a `Row` of scalars. Both are
trees to jax, which knows named tuples.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxpipe.schedule.action import Op
from jaxpipe.schedule.lifetimes import Buffers

Leaf = TypeVar("Leaf")


class EndColumns(NamedTuple, Generic[Leaf]):
    """What all ranks do together at the start of a tick where they share the vocabulary.

    `head[k]` is about rank `last_ranks[k]`, `embed[k]` and `embed_gradient[k]` about rank
    `first_ranks[k]` of the tables: 1 + a microbatch, 0 for none; the same value on every rank.
    """

    embed: tuple[Leaf, ...]
    """The embedding of this microbatch is made for that rank, which stores it."""
    head: tuple[Leaf, ...]
    """The loss of the y that that rank made last, whose gradient it stores."""
    embed_gradient: tuple[Leaf, ...]
    """The embedding's gradient, of the dx that that rank made last."""
    embed_write: Leaf
    """Slot of the inbox for an embedding, of the rank that it is for."""
    dy_write: Leaf
    """Slot of the inbox for a gradient at y, of the rank that made y."""


class StepColumns(NamedTuple, Generic[Leaf]):
    """Where steps that are one schedule end and begin, on every rank at its own time."""

    ends: Leaf
    """Flag: the rank's sums of gradients are whole for this step: its update follows."""
    begins: Leaf
    """Flag: its sums begin anew, in the tick after an update."""
    embeds: Leaf
    """Flag: the rank's gradient of the embedding is its step's first."""


class Row(NamedTuple, Generic[Leaf]):
    """One integer per column, for each tick and rank.

    Columns hold 0, slot columns the size of their buffer (an index behind its last slot), in cells
    that do not use them. Flags are 0 or 1. Slots are those of `Buffers`.
    """

    F: Leaf
    """1 + the chunk whose F this is."""
    B: Leaf
    """1 + the chunk whose B this is."""
    W: Leaf
    """1 + the chunk whose W this is."""
    BW: Leaf
    """1 + the chunk whose BW this is."""
    pair: Leaf
    """1 + an index into the tables' `pairs`; the four columns above are then 0."""
    forward_mb: Leaf
    """The microbatch of F."""
    gradient_mb: Leaf
    """The microbatch of B, W or BW."""

    embed: Leaf
    """Flag: F takes the embedding of its microbatch, not `x_read`."""
    head: Leaf
    """Flag: the loss follows F, and leaves the output gradient in place of y."""
    head_weight: Leaf
    """Flag: the gradients of the head's own matrices are made, which have waited for W."""
    embed_gradient: Leaf
    """Flag: the embedding's gradient follows, of the dx just made or, deferred, of `dx_read`."""
    dy_of_head: Leaf
    """Flag: a gradient takes what the head has just left, not `dy_read`."""
    first_slice: Leaf
    """Flag: F takes zeros, not `state`: it is of a sequence's first slice."""
    last_slice: Leaf
    """Flag: B and BW take zeros, not `dstate`: they are of a sequence's last slice."""

    x_read: Leaf
    """Slot of the inbox that F reads."""
    dy_read: Leaf
    """Slot of the inbox that B or BW reads."""
    keep_y: Leaf
    """Slot of the inbox for the y that this rank made last and reads itself."""
    keep_dx: Leaf
    """Slot of the inbox for the dx that this rank made last and reads itself."""
    turn: Leaf
    """Which of the tables' routes are those of this tick; the same value on every rank."""
    arrive: tuple[Leaf, ...]
    """By lane: slot of the inbox for what arrives."""
    send: tuple[Leaf, ...]
    """By lane: 1 + which of its kinds is sent, 0 where nobody waits for what was made last."""

    for_b_write: Leaf
    """Slot for the residuals that F leaves for B."""
    for_b_read: Leaf
    """Slot of the residuals that B and BW read."""
    for_w_write: Leaf
    """Slot for the residuals that F leaves for W."""
    for_w_read: Leaf
    """Slot of the residuals that B, W and BW read."""
    stash_write: Leaf
    """Slot for what B leaves for W."""
    stash_read: Leaf
    """Slot of what W reads of B."""
    head_write: Leaf
    """Slot for what the loss leaves for `head_weight`."""
    head_read: Leaf
    """Slot of what `head_weight` reads."""
    dx_write: Leaf
    """Slot for the dx of stage 0 that the embedding's gradient waits for."""
    dx_read: Leaf
    """Slot of the dx that `embed_gradient` reads."""
    state: Leaf
    """Slot of what slices of a sequence share: F reads and writes it."""
    state_read: Leaf
    """Slot of what slices of a sequence share, as B and BW read it."""
    dstate: Leaf
    """Slot of the gradient at what slices share: B and BW read and write it."""

    ends: EndColumns[Leaf] | None
    """None where the ranks of the first and last stages compute the ends alone."""
    steps: StepColumns[Leaf] | None
    """None where the update stands outside: of one step."""
    tick: Leaf | None = None
    """Its number, where messages are printed; no table has it."""

    def chunk_of(self, op: Op) -> Leaf:
        """1 + the chunk that this op is run of, outside pairs.

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
    """Columns `[T, P]` for so many lanes in which no cell uses anything yet."""

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
