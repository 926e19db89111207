"""One tick on one rank: receive, then what its cell holds, each kind of work in a cond of its own.

Every buffer is written only by two-way `lax.cond`s whose other branch passes it on, and within a
tick it is written before it is read: so XLA updates all of them in place. Only messages (and what
the embedding's gradient waits for) are stored outside a cond; idle ones go to a spare slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry, LeftByB, LeftByF
from jaxpipe.pipeline.chunk import Chunk, Kept
from jaxpipe.pipeline.ends import OwnEnds, SharedEnds
from jaxpipe.pipeline.split import LayerSplit, Residuals
from jaxpipe.pipeline.stage import StageFunctions
from jaxpipe.pipeline.transfers import Transfers
from jaxpipe.schedule import Op, Pair, Row, Tables

Tree = Any
GradientState = tuple[jax.Array, tuple[LeftByB, ...], tuple[Tree, ...]]


@dataclass(frozen=True)
class RankWork:
    """One rank's functions and the values that no tick changes.

    `batch` has leaves `[M, B, ...]`; `state` has the shapes of what slices of a sequence share,
    None where sequences are whole. A forward-only pass has no `split`.
    """

    functions: StageFunctions
    ends: OwnEnds | SharedEnds
    split: LayerSplit | None
    state: Tree
    shared: Tree
    chunks: tuple[Chunk, ...]
    batch: Tree
    tables: Tables
    poison: bool

    def first_carry(self, x: jax.ShapeDtypeStruct, gradients: Tree) -> Carry:
        """Empty buffers; `gradients` gives the shapes and dtypes of the accumulators."""

        def ring(slots: int, like: Any) -> Any:
            return jax.tree.map(
                lambda leaf: buffers.make_ring(slots, leaf, poison=self.poison), like
            )

        slots, layer_slots = self.tables.slots, self.chunks[0].layers
        nothing = Residuals((), ())
        message = jnp.full(x.shape, jnp.nan if self.poison else 0, x.dtype)
        microbatches = jax.tree.leaves(self.batch)[0].shape[0]
        carry = Carry(
            y=message,
            dx=None,
            arriving=self._transfers.arriving(message),
            inbox=ring(slots.inbox + 1, x),
            by_f=tuple(LeftByF(nothing, ring(slots.state, self.state)) for _ in layer_slots),
            by_b=(),
            for_head=(),
            for_embed=(),
            layer_gradients=(),
            shared_gradients=None,
            losses=jnp.zeros(microbatches, self.ends.share.dtype),
        )
        if self.split is None:
            return carry
        kept = self.split.residuals
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), gradients)
        if slots.head:
            head = self.ends.split
            carry = carry._replace(for_head=ring(slots.head, (head.residuals.for_w, head.stash)))
        if slots.embed:
            carry = carry._replace(for_embed=ring(slots.embed + 1, x))
        return carry._replace(
            dx=message,
            by_f=tuple(
                left._replace(
                    residuals=Residuals(
                        ring(slots.for_b, kept.for_b), ring(slots.for_w, kept.for_w)
                    )
                )
                for left in carry.by_f
            ),
            by_b=tuple(
                LeftByB(ring(slots.stash, self.split.stash), ring(slots.dstate, self.state))
                for _ in layer_slots
            ),
            layer_gradients=zeros["layers"],
            shared_gradients=zeros["shared"],
        )

    @property
    def _transfers(self) -> Transfers:
        return Transfers(self.tables, self.poison)

    def tick(self, carry: Carry, row: Row) -> Carry:
        """Run one row of the tables."""
        with jax.named_scope("exchange"):
            arriving, inbox, row = self._transfers.receive(
                carry.y, carry.dx, carry.arriving, carry.inbox, row
            )
        carry = carry._replace(arriving=arriving, inbox=inbox)
        carry = self.ends.after_receiving(carry, row)
        if self.poison:
            nothing = jnp.full_like(carry.y, jnp.nan)
            carry = carry._replace(y=nothing, dx=None if carry.dx is None else nothing)
        read = {op: self._read(carry, row, op) for op in {pair.op for pair in self.tables.pairs}}
        for index, pair in enumerate(self.tables.pairs):
            with jax.named_scope(f"F_chunk{pair.forward}+{pair.op.name}_chunk{pair.gradient}"):
                carry = self._pair(carry, row, row.pair == index + 1, pair, read[pair.op])
        for chunk in self.tables.forwards:
            with jax.named_scope(f"F_chunk{chunk}"):
                carry = self._forward(carry, row, row.chunk_of(Op.F) == chunk + 1, chunk)
        carry = self.ends.after_forward(carry, row)
        for op, chunk in self.tables.gradients:
            with jax.named_scope(f"{op.name}_chunk{chunk}"):
                carry = self._gradient(carry, row, row.chunk_of(op) == chunk + 1, op, chunk)
        carry = self.ends.after_gradient(carry, row)
        return self._spoil(carry, row) if self.poison else carry

    def _forward(self, carry: Carry, row: Row, runs: jax.Array, chunk: int) -> Carry:
        """F of one chunk, leaving residuals."""
        work = self.chunks[chunk]

        def run() -> tuple[jax.Array, tuple[LeftByF, ...]]:
            layer = self.functions.layer if self.split is None else self.split
            return work.forward(layer, *self._input(carry, row), carry.by_f, row)

        y, by_f = lax.cond(runs, run, lambda: (carry.y, carry.by_f))
        return carry._replace(y=y, by_f=by_f)

    def _gradient(self, carry: Carry, row: Row, runs: jax.Array, op: Op, chunk: int) -> Carry:
        """B, W or BW of one chunk, adding to its parameters' gradients."""

        def kept(slot: int) -> Kept:
            return Kept.read(carry.by_f[slot], carry.by_b[slot], row, op)

        def run() -> GradientState:
            return self._run_gradient(carry, row, op, chunk, kept, in_turn=True)

        made = lax.cond(runs, run, lambda: self._gradient_state(carry, op, chunk))
        return self._with_gradient(carry, op, chunk, made)

    def _pair(self, carry: Carry, row: Row, runs: jax.Array, pair: Pair, read: list[Kept]) -> Carry:
        """F of one chunk and a gradient of another in one branch, neither waiting for the other.

        What the gradient reads has been `read` before the branch, in which the rings are then only
        written: with both in one branch XLA would copy them, as it would copy the sums of gradients
        if layers went in turn.
        """
        passed = carry.y, carry.by_f, self._gradient_state(carry, pair.op, pair.gradient)

        def run() -> tuple[jax.Array, tuple[LeftByF, ...], GradientState]:
            x, microbatch = self._input(carry, row)
            y, by_f = self.chunks[pair.forward].forward(self.split, x, microbatch, carry.by_f, row)
            made = self._run_gradient(carry, row, pair.op, pair.gradient, read.__getitem__)
            return y, by_f, made

        y, by_f, made = lax.cond(runs, run, lambda: passed)
        carry = carry._replace(y=y, by_f=by_f)
        return self._with_gradient(carry, pair.op, pair.gradient, made)

    def _read(self, carry: Carry, row: Row, op: Op) -> list[Kept]:
        """What a gradient reads of every layer slot."""
        return [Kept.read(*rings, row, op) for rings in zip(carry.by_f, carry.by_b)]

    def _gradient_state(self, carry: Carry, op: Op, chunk: int) -> GradientState:
        """What a gradient action changes: dx, rings (the stash if it is B), sums of gradients."""
        left = {
            Op.B: carry.by_b,
            Op.BW: tuple(left._replace(stash=()) for left in carry.by_b),
            Op.W: (LeftByB((), ()),) * len(carry.by_b),
        }
        return carry.dx, left[op], carry.layer_gradients[chunk]

    def _run_gradient(
        self,
        carry: Carry,
        row: Row,
        op: Op,
        chunk: int,
        kept: Callable[[int], Kept],
        *,
        in_turn: bool = False,
    ) -> GradientState:
        dx, rings, totals = self._gradient_state(carry, op, chunk)
        microbatch = buffers.read(self.batch, row.gradient_mb)
        if op is not Op.W:
            dx = self._choose(
                row.dy_of_head,
                self.tables.columns.dy_of_head,
                lambda: carry.y,
                lambda: buffers.read(carry.inbox, row.dy_read),
            )
        return self.chunks[chunk].gradient(
            self.split, op, dx, microbatch, kept, rings, totals, row, in_turn=in_turn
        )

    @staticmethod
    def _with_gradient(carry: Carry, op: Op, chunk: int, made: GradientState) -> Carry:
        dx, rings, totals = made
        gradients = list(carry.layer_gradients)
        gradients[chunk] = totals
        by_b = {
            Op.B: rings,
            Op.BW: tuple(b._replace(dstate=new.dstate) for b, new in zip(carry.by_b, rings)),
            Op.W: carry.by_b,
        }
        return carry._replace(dx=dx, by_b=by_b[op], layer_gradients=tuple(gradients))

    def _input(self, carry: Carry, row: Row) -> tuple[jax.Array, Tree]:
        """x of F, from the embedding or the inbox, and its microbatch."""
        microbatch = buffers.read(self.batch, row.forward_mb)
        x = self._choose(
            row.embed,
            self.tables.columns.embed,
            lambda: self.functions.embed(self.shared, microbatch),
            lambda: buffers.read(carry.inbox, row.x_read),
        )
        return x, microbatch

    @staticmethod
    def _choose(
        flag: jax.Array,
        column: np.ndarray,
        yes: Callable[[], jax.Array],
        no: Callable[[], jax.Array],
    ) -> jax.Array:
        """One of two values by a flag; the other is left out where no cell of the column has it."""
        return lax.cond(flag, yes, no) if column.any() else no()

    def _spoil(self, carry: Carry, row: Row) -> Carry:
        """Poison in every slot that this tick has read for the last time."""
        inbox = buffers.spoil(carry.inbox, row.x_read)
        carry = carry._replace(inbox=buffers.spoil(inbox, row.dy_read))
        if self.split is None:
            return carry
        if self.tables.slots.embed:
            carry = carry._replace(for_embed=buffers.spoil(carry.for_embed, row.dx_read))

        def ran(*ops: Op) -> jax.Array:
            """Whether the cell's gradient is one of these."""
            flags = [row.chunk_of(op) > 0 for op in ops]
            flags += [
                row.pair == index + 1
                for index, pair in enumerate(self.tables.pairs)
                if pair.op in ops
            ]
            return jnp.stack(flags).any()

        def spoil(rings: Tree, slot: jax.Array, when: jax.Array) -> Tree:
            return lax.cond(when, lambda: buffers.spoil(rings, slot), lambda: rings)

        if self.tables.slots.head:
            waited = spoil(carry.for_head, row.head_read, row.head_weight > 0)
            carry = carry._replace(for_head=waited)
        if self.tables.splits:
            carry = carry._replace(
                by_b=tuple(
                    left._replace(stash=spoil(left.stash, row.stash_read, ran(Op.W)))
                    for left in carry.by_b
                )
            )
        return carry._replace(
            by_f=tuple(
                left._replace(
                    residuals=Residuals(
                        spoil(left.residuals.for_b, row.for_b_read, ran(Op.B, Op.BW)),
                        spoil(left.residuals.for_w, row.for_w_read, ran(Op.W, Op.BW)),
                    )
                )
                for left in carry.by_f
            )
        )
