"""One tick on one rank: receive, then what its cell holds, each kind of work in a cond of its own.

Every buffer is written only by two-way `lax.cond`s whose other branch passes it on, and within a
tick it is written before it is read: so XLA updates all of them in place. Only messages (and what
the embedding's gradient waits for) are stored outside a cond; idle ones go to a spare slot.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.chunk import Chunk, Given, Gradients, Made
from jaxpipe.pipeline.ends import Ends, StepData
from jaxpipe.pipeline.kind import RunKind, empty_side, first_observed
from jaxpipe.pipeline.pairing import paired
from jaxpipe.pipeline.poison import spoil
from jaxpipe.pipeline.rings import Kept, RingPlan, Rings
from jaxpipe.pipeline.transfers import Transfers
from jaxpipe.schedule import Op, Pair, Row

Tree = Any


@dataclass(frozen=True)
class RankWork:
    """One rank's step: its chunks and ends, and what no tick changes.

    `kinds` has for every ring slot the kind of layer that it is for. `closing`: the gradient of the
    tick is the step's last of its chunk, and every rank computes it (`ticks.py`).
    """

    step: StepData
    ends: Ends
    chunks: tuple[Chunk, ...]
    kinds: tuple[RunKind, ...]
    closing: bool = False

    def first_carry(self, x: jax.ShapeDtypeStruct, gradients: Tree) -> Carry:
        """Empty buffers; `gradients` gives the shapes and dtypes of the accumulators."""
        step, slots = self.step, self.step.tables.slots
        message = jnp.full(x.shape, jnp.nan if step.poison else 0, x.dtype)
        microbatches = jax.tree.leaves(step.batch)[0].shape[0]
        carry = Carry(
            y=message,
            dx=None,
            arriving=self._transfers.arriving(message),
            inbox=self._ring(slots.inbox + 1, x),
            rings=tuple(
                plan.empty(slot, poison=step.poison) for slot, plan in enumerate(self._plans)
            ),
            for_head=(),
            for_embed=(),
            layer_gradients=(),
            shared_gradients=None,
            losses=jnp.zeros((microbatches, *step.loss.shape), step.loss.dtype),
            aux_losses=(
                jnp.zeros(microbatches, step.loss.dtype) if self._layers_make_losses else None
            ),
            side=empty_side(self.kinds, microbatches),
            observed={},
            outputs=jax.tree.map(
                lambda like: jnp.zeros((microbatches, *like.shape), like.dtype), step.outputs
            ),
        )
        if not step.tables.trains:
            return carry
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), gradients)
        if slots.head:
            head = self.ends.split
            for_head = self._ring(slots.head, (head.residuals.for_w, head.stash))
            carry = carry._replace(for_head=for_head)
        if slots.embed:
            carry = carry._replace(for_embed=self._ring(slots.embed + 1, x))
        return carry._replace(
            dx=message,
            observed=first_observed(self.kinds, step.variables),
            layer_gradients=zeros["layers"],
            shared_gradients=zeros["shared"],
        )

    def _ring(self, slots: int, like: Tree) -> Tree:
        poison = self.step.poison
        return jax.tree.map(lambda leaf: buffers.make_ring(slots, leaf, poison=poison), like)

    @property
    def _transfers(self) -> Transfers:
        return Transfers(self.step.tables, self.step.poison, self.step.printer)

    def tick(self, carry: Carry, row: Row) -> Carry:
        """Run one row of the tables."""
        tables = self.step.tables
        with jax.named_scope("exchange"):
            arriving, inbox, row = self._transfers.receive(
                carry.y, carry.dx, carry.arriving, carry.inbox, row
            )
        carry = carry._replace(arriving=arriving, inbox=inbox)
        carry = self.ends.after_receiving(carry, row)
        if self.step.poison:
            nothing = jnp.full_like(carry.y, jnp.nan)
            carry = carry._replace(y=nothing, dx=None if carry.dx is None else nothing)
        read = {op: self._read(carry, row, op) for op in {pair.op for pair in tables.pairs}}
        for index, pair in enumerate(tables.pairs):
            with jax.named_scope(f"F_chunk{pair.forward}+{pair.op.name}_chunk{pair.gradient}"):
                carry = self._pair(carry, row, row.pair == index + 1, pair, read[pair.op])
        for chunk in tables.forwards:
            with jax.named_scope(f"F_chunk{chunk}"):
                carry = self._forward(carry, row, chunk + 1 == row.F, chunk)
        carry = self.ends.after_forward(carry, row)
        for op, chunk in tables.gradients:
            with jax.named_scope(f"{op.name}_chunk{chunk}"):
                carry = self._gradient(carry, row, row.chunk_of(op) == chunk + 1, op, chunk)
        carry = self.ends.after_gradient(carry, row)
        return spoil(carry, row, tables, self._plans) if self.step.poison else carry

    def _forward(self, carry: Carry, row: Row, runs: jax.Array, chunk: int) -> Carry:
        """F of one chunk, leaving residuals."""

        def run() -> tuple[Made, jax.Array | None]:
            given, before = self._given_forward(carry, row)
            return self._forward_made(carry, row, self.chunks[chunk].forward(given, before))

        return self._with_forward(carry, *lax.cond(runs, run, lambda: self._before_forward(carry)))

    def _gradient(self, carry: Carry, row: Row, runs: jax.Array, op: Op, chunk: int) -> Carry:
        """B, W or BW of one chunk, adding to its parameters' gradients."""

        def kept(ring: int, part: Rings) -> Kept:
            plan = self._plans[ring]
            return plan.read(plan.after(carry.rings[ring], op, part), row, op)

        def run() -> Gradients:
            given, before = self._given_gradient(carry, row, op, chunk)
            if self.closing:
                return self.chunks[chunk].last_gradient(op, given, before, kept, runs)
            return self.chunks[chunk].gradient(op, given, before, kept, in_turn=True)

        if self.closing:
            return self._with_gradient(carry, op, chunk, run())
        made = lax.cond(runs, run, lambda: self._before_gradient(carry, op, chunk))
        return self._with_gradient(carry, op, chunk, made)

    def _pair(self, carry: Carry, row: Row, runs: jax.Array, pair: Pair, read: list[Kept]) -> Carry:
        """F of one chunk and a gradient of another in one branch, neither waiting for the other.

        What the gradient reads has been `read` before the branch, in which the rings are then only
        written: with both in one branch XLA would copy them, as it would copy the sums of gradients
        if layers went in turn.
        """
        passed = self._before_forward(carry), self._before_gradient(carry, pair.op, pair.gradient)
        ahead, back = self.chunks[pair.forward], self.chunks[pair.gradient]

        def run() -> tuple[Any, Gradients]:
            given, x = self._given_forward(carry, row)
            behind, dy = self._given_gradient(carry, row, pair.op, pair.gradient)
            layers = back.gradients(pair.op, behind, lambda ring, _: read[ring])
            made, gradients = paired(ahead.forwards(given), x, layers, dy, ahead.hooks)
            return self._forward_made(carry, row, made), gradients

        forward, gradient = lax.cond(runs, run, lambda: passed)
        carry = self._with_forward(carry, *forward)
        return self._with_gradient(carry, pair.op, pair.gradient, gradient)

    def _read(self, carry: Carry, row: Row, op: Op) -> list[Kept]:
        """What a gradient reads of every ring slot."""
        return [plan.read(rings, row, op) for plan, rings in zip(self._plans, carry.rings)]

    @property
    def _plans(self) -> list[RingPlan]:
        """How each ring slot is used."""
        return [kind.rings for kind in self.kinds]

    @property
    def _layers_make_losses(self) -> bool:
        return any(kind.output.side.loss is not None for kind in self.kinds)

    def _before_forward(self, carry: Carry) -> tuple[Made, jax.Array | None]:
        """What F changes: y, its rings, side outputs; and the layers' losses, if they make any."""
        return Made(carry.y, self._parts(carry, Op.F), carry.side, None), carry.aux_losses

    def _given_forward(self, carry: Carry, row: Row) -> tuple[Given, Made]:
        x, rows = self._input(carry, row)
        before, losses = self._before_forward(carry)
        if losses is not None:
            before = before._replace(loss=jnp.zeros((), losses.dtype))
        return self._given(row, rows), before._replace(y=x)

    def _forward_made(self, carry: Carry, row: Row, made: Made) -> tuple[Made, jax.Array | None]:
        losses = carry.aux_losses
        if losses is not None:
            losses = self.step.aux.recorded(losses, made.loss, row.forward_mb)
        return made._replace(loss=None), losses

    def _given(self, row: Row, rows: Tree) -> Given:
        return Given(row, rows, self.step.variables, self.step.aux.seed)

    def _given_gradient(
        self, carry: Carry, row: Row, op: Op, chunk: int
    ) -> tuple[Given, Gradients]:
        before = self._before_gradient(carry, op, chunk)
        rows = self.step.rows(row.gradient_mb)
        if op is not Op.W:
            dy = self.step.choose(
                lambda row: row.dy_of_head, row,
                lambda: carry.y, lambda: buffers.read(carry.inbox, row.dy_read),
            )  # fmt: skip
            before = before._replace(dx=dy)
        return self._given(row, rows), before

    def _input(self, carry: Carry, row: Row) -> tuple[jax.Array, Tree]:
        """x of F, from the embedding or the inbox, and its microbatch."""
        rows = self.step.rows(row.forward_mb)
        embed, shared = self.ends.functions.embed, self.step.shared
        x = self.step.choose(
            lambda row: row.embed, row,
            lambda: embed(shared, rows), lambda: buffers.read(carry.inbox, row.x_read),
        )  # fmt: skip
        return x, rows

    def _with_forward(self, carry: Carry, made: Made, losses: jax.Array | None) -> Carry:
        rings = self._after(carry, Op.F, made.rings)
        return carry._replace(y=made.y, rings=rings, side=made.side, aux_losses=losses)

    def _before_gradient(self, carry: Carry, op: Op, chunk: int) -> Gradients:
        """What a gradient action changes, as it is before."""
        totals = carry.layer_gradients[chunk]
        return Gradients(carry.dx, self._parts(carry, op), totals, carry.observed)

    def _with_gradient(self, carry: Carry, op: Op, chunk: int, made: Gradients) -> Carry:
        gradients = list(carry.layer_gradients)
        gradients[chunk] = made.totals
        rings = self._after(carry, op, made.rings)
        return carry._replace(
            dx=made.dx, rings=rings, layer_gradients=tuple(gradients), observed=made.observed
        )

    def _parts(self, carry: Carry, op: Op) -> tuple[Rings, ...]:
        """The rings that an op writes."""
        return tuple(plan.part(rings, op) for plan, rings in zip(self._plans, carry.rings))

    def _after(self, carry: Carry, op: Op, parts: tuple[Rings, ...]) -> tuple[Rings, ...]:
        """All rings, once an op has written its parts of them."""
        every = zip(self._plans, carry.rings, parts)
        return tuple(plan.after(rings, op, part) for plan, rings, part in every)
