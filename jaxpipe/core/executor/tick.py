"""One tick on one pipeline rank: receive messages, then run the actions of the tick's table row.

Every kind of action has a two-way `lax.cond` of its own, whose other branch passes the buffers
through unchanged, and within a tick a buffer is written before it is read. XLA therefore updates
all buffers in place. Where an action must read a ring buffer before it writes it, an optimization
barrier ends the read. Only messages and the dx that a deferred embedding gradient reads are stored
outside a cond; those without use go to a dummy slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.action_values import ActionInputs, BackwardOutputs, ForwardOutputs
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.embed_head import EmbedHead
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.paired import run_paired
from jaxpipe.core.executor.poison import poison_read_slots
from jaxpipe.core.executor.ring_buffers import GradientInputs, RingArrays, RingBuffers
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.traced_kind import BufferedKind
from jaxpipe.core.executor.transfers import Transfers
from jaxpipe.core.schedule import Op, OverlapPair, TableRow
from jaxpipe.core.split.phases import run_in_phases


@dataclass(frozen=True)
class DeviceWork:
    """What one device computes in every tick of a step.

    Attributes:
      embed_head: embedding and head.
      chunks: the chunks of this pipeline rank.
      kinds: the traced layer kind of every ring group (chunks share ring groups).
      closing: this is the closing tick (`ticks.py`): its gradient action is the chunk's last of the
        step and runs on every pipeline rank, in no cond.
    """

    embed_head: EmbedHead
    chunks: tuple[Chunk, ...]
    kinds: tuple[BufferedKind, ...]
    closing: bool = False

    @property
    def params(self) -> Tree:
        """Parameters of the layers, by chunk and run."""
        return tuple(tuple(run.params for run in chunk.runs) for chunk in self.chunks)

    def with_params(self, params: Tree) -> "DeviceWork":
        """Return the work with other parameters of the layers, in the form of `params`."""
        chunks = (
            Chunk(tuple(replace(run, params=new) for run, new in zip(chunk.runs, of_chunk)))
            for chunk, of_chunk in zip(self.chunks, params)
        )
        return replace(self, chunks=tuple(chunks))

    def tick(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Run one tick as a row of the tables says, and return the carry of the next."""
        tables = step.tables
        with jax.named_scope("exchange"):
            arriving, inbox, row = transfers_of(step).receive(
                carry.y, carry.dx, carry.arriving, carry.inbox, row
            )
        carry = carry._replace(arriving=arriving, inbox=inbox)
        vocab_parallel = tables.lockstep.vocab_parallel
        if vocab_parallel:
            carry = self.embed_head.run_on_all_ranks(step, carry, row)
        if step.poison:
            nothing = jnp.full_like(carry.y, jnp.nan)
            carry = carry._replace(y=nothing, dx=nothing if tables.has_gradients else None)
        read = {op: self._read(carry, row, op) for op in {pair.op for pair in tables.pairs}}
        for index, pair in enumerate(tables.pairs):
            with jax.named_scope(f"F_chunk{pair.forward}+{pair.op.name}_chunk{pair.gradient}"):
                carry = self._pair(step, carry, row, row.pair == index + 1, pair, read[pair.op])
        for chunk in tables.forwards:
            with jax.named_scope(f"F_chunk{chunk}"):
                carry = self._forward(step, carry, row, chunk + 1 == row.F, chunk)
        if not vocab_parallel:
            carry = self.embed_head.run_head(step, carry, row)
        for chunk in tables.recomputations:
            with jax.named_scope(f"R_chunk{chunk}"):
                carry = self._recompute(step, carry, row, chunk)
        for op, chunk in tables.gradients:
            with jax.named_scope(f"{op.name}_chunk{chunk}"):
                carry = self._gradient(
                    step, carry, row, row.chunk_column(op) == chunk + 1, op, chunk
                )
        if not vocab_parallel:
            carry = self.embed_head.run_weight_gradients(step, carry, row)
        return poison_read_slots(carry, row, tables, self.rings) if step.poison else carry

    def first_tick(
        self, step: StepData, carry: Carry, row: TableRow, chunk: Chunk
    ) -> tuple["DeviceWork", Carry]:
        """Run the opening tick (`ticks.py`) and return the work of the others and its carry.

        All pipeline ranks run F of their first chunk, whose parameters are shards in `chunk`. It
        counts where the row says so; residuals of other ranks go to slots that are empty yet.
        """
        if step.tables.lockstep.vocab_parallel:
            carry = self.embed_head.run_on_all_ranks(step, carry, row)
        inputs, before = self._forward_inputs(step, carry, row)
        with jax.named_scope("F_chunk0"):
            outputs = _run_forward(step, partial(chunk.first_forward, inputs, before))
        params = outputs.params, *self.params[1:]
        ran, losses = self._with_aux_losses(carry, row, outputs._replace(params=()))
        y, aux, losses = jax.tree.map(
            partial(jnp.where, row.F == 1),
            (ran.y, ran.aux, losses),
            (carry.y, carry.aux, carry.aux_losses),
        )
        carry = self._with_forward(carry, ran._replace(y=y, aux=aux), losses)
        return self.with_params(params), carry

    def _forward(
        self, step: StepData, carry: Carry, row: TableRow, runs: jax.Array, chunk: int
    ) -> Carry:
        """Run F of one chunk if the flag `runs` is set; residuals go to ring buffers."""

        def run() -> tuple[ForwardOutputs, jax.Array | None]:
            inputs, before = self._forward_inputs(step, carry, row)
            outputs = _run_forward(step, partial(self.chunks[chunk].forward, inputs, before))
            return self._with_aux_losses(carry, row, outputs)

        return self._with_forward(carry, *lax.cond(runs, run, lambda: self._forward_state(carry)))

    def _recompute(self, step: StepData, carry: Carry, row: TableRow, chunk: int) -> Carry:
        """Run R of one chunk if the row says so; residuals go to ring buffers."""
        before, own = self._written_by(carry, Op.R), row.recompute
        assert own is not None

        def run() -> tuple[RingArrays, ...]:
            inputs = _action_inputs(step, row, step.rows(own.microbatch))
            return self.chunks[chunk].recompute(inputs, own.for_r_read, before)

        written = lax.cond(chunk + 1 == own.chunk, run, lambda: before)
        return carry._replace(rings=self._with_written(carry, Op.R, written))

    def _gradient(
        self, step: StepData, carry: Carry, row: TableRow, runs: jax.Array, op: Op, chunk: int
    ) -> Carry:
        """Run B, W or BW of one chunk if `runs` is set; gradients go to the accumulators."""

        def read_inputs(layer: LayerRun, written: RingArrays) -> GradientInputs:
            rings, arrays = self.rings[layer.ring], carry.rings[layer.ring]
            return rings.read(rings.with_written(arrays, op, written), row, op, layer.first)

        def run() -> BackwardOutputs:
            inputs, before = self._gradient_inputs(step, carry, row, op, chunk)
            return self.chunks[chunk].gradient(op, inputs, before, read_inputs, in_turn=True)

        if self.closing:
            inputs, before = self._gradient_inputs(step, carry, row, op, chunk)
            sums, shared = carry.layer_gradients, carry.embed_head_gradients
            # XLA copies sums that layers add to if these sums are also held for the reductions.
            held = None if before.read_sums is shared else shared
            reduced = held, sums[:chunk], sums[chunk + 1 :]
            outputs, reduced = self.chunks[chunk].last_gradient(
                op, inputs, before, read_inputs, runs, reduced
            )
            shared, earlier, later = reduced
            sums = *earlier, sums[chunk], *later
            carry = carry._replace(embed_head_gradients=shared, layer_gradients=sums)
            return self._with_gradient(carry, op, chunk, outputs)
        outputs = lax.cond(runs, run, lambda: self._gradient_state(carry, op, chunk))
        return self._with_gradient(carry, op, chunk, outputs)

    def _pair(
        self,
        step: StepData,
        carry: Carry,
        row: TableRow,
        runs: jax.Array,
        pair: OverlapPair,
        read: list[GradientInputs],
    ) -> Carry:
        """Run F of one chunk and a gradient action of another in one branch, free to overlap.

        The inputs of the gradient action come in `read`, from before the branch, so that the branch
        only writes ring buffers: if it also read them, XLA would copy them. For the same reason W
        is not ordered one layer behind B here (`in_turn`): XLA would copy the accumulators.
        """
        passed = self._forward_state(carry), self._gradient_state(carry, pair.op, pair.gradient)
        ahead, back = self.chunks[pair.forward], self.chunks[pair.gradient]

        def run() -> tuple[Any, BackwardOutputs]:
            inputs, x = self._forward_inputs(step, carry, row)
            behind, dy = self._gradient_inputs(step, carry, row, pair.op, pair.gradient)
            layers = back.gradient_runs(pair.op, behind, lambda layer, _: read[layer.ring])
            outputs, gradients = run_paired(ahead.forward_runs(inputs), x, layers, dy, ahead.pairs)
            return self._with_aux_losses(carry, row, outputs), gradients

        forward, gradient = lax.cond(runs, run, lambda: passed)
        carry = self._with_forward(carry, *forward)
        return self._with_gradient(carry, pair.op, pair.gradient, gradient)

    def _read(self, carry: Carry, row: TableRow, op: Op) -> list[GradientInputs]:
        """Read the inputs of a gradient action from all ring buffers; no group has two layers."""
        return [rings.read(arrays, row, op, 0) for rings, arrays in zip(self.rings, carry.rings)]

    @property
    def rings(self) -> list[RingBuffers]:
        """The ring buffers of every ring group."""
        return [kind.rings for kind in self.kinds]

    def _forward_state(self, carry: Carry) -> tuple[ForwardOutputs, jax.Array | None]:
        """Return the state that F updates; the second value is `carry.aux_losses`."""
        written = self._written_by(carry, Op.F)
        return ForwardOutputs(carry.y, written, carry.aux, None), carry.aux_losses

    def _forward_inputs(
        self, step: StepData, carry: Carry, row: TableRow
    ) -> tuple[ActionInputs, ForwardOutputs]:
        x, rows = self._input(step, carry, row)
        before, losses = self._forward_state(carry)
        if losses is not None:
            before = before._replace(loss=jnp.zeros((), losses.dtype))
        return _action_inputs(step, row, rows), before._replace(y=x)

    def _with_aux_losses(
        self, carry: Carry, row: TableRow, outputs: ForwardOutputs
    ) -> tuple[ForwardOutputs, jax.Array | None]:
        losses = carry.aux_losses
        if losses is not None:
            losses = losses.at[row.forward_mb].add(outputs.loss)
        return outputs._replace(loss=None), losses

    def _gradient_inputs(
        self, step: StepData, carry: Carry, row: TableRow, op: Op, chunk: int
    ) -> tuple[ActionInputs, BackwardOutputs]:
        before = self._gradient_state(carry, op, chunk)
        rows = step.rows(row.gradient_mb)
        if op is not Op.W:
            dy = step.choose(
                lambda row: row.dy_of_head, row,
                lambda: carry.y, lambda: buffers.read(carry.inbox, row.dy_read),
            )  # fmt: skip
            before = before._replace(dx=dy)
        return _action_inputs(step, row, rows), before

    def _input(self, step: StepData, carry: Carry, row: TableRow) -> tuple[jax.Array, Tree]:
        """Return x of F, from the embedding or the inbox, and its microbatch's rows."""
        rows = step.rows(row.forward_mb)
        embed = self.embed_head.embed.function
        x = step.choose(
            lambda row: row.embed, row,
            lambda: embed(step.embed_head, rows),
            lambda: buffers.read(carry.inbox, row.x_read),
        )  # fmt: skip
        return x, rows

    def _with_forward(
        self, carry: Carry, outputs: ForwardOutputs, losses: jax.Array | None
    ) -> Carry:
        rings = self._with_written(carry, Op.F, outputs.rings)
        return carry._replace(y=outputs.y, rings=rings, aux=outputs.aux, aux_losses=losses)

    def _gradient_state(self, carry: Carry, op: Op, chunk: int) -> BackwardOutputs:
        """Return the state that a gradient action updates."""
        totals, written = carry.layer_gradients[chunk], self._written_by(carry, op)
        read = getattr(carry, _read_sums(carry)) if self.chunks[chunk].reads_embed_head else None
        return BackwardOutputs(carry.dx, written, totals, carry.statistics, read)

    def _with_gradient(self, carry: Carry, op: Op, chunk: int, outputs: BackwardOutputs) -> Carry:
        gradients = list(carry.layer_gradients)
        gradients[chunk] = outputs.grad_sums
        rings = self._with_written(carry, op, outputs.rings)
        if self.chunks[chunk].reads_embed_head:
            carry = carry._replace(**{_read_sums(carry): outputs.read_sums})
        return carry._replace(
            dx=outputs.dx,
            rings=rings,
            layer_gradients=tuple(gradients),
            statistics=outputs.statistics,
        )

    def _written_by(self, carry: Carry, op: Op) -> tuple[RingArrays, ...]:
        """Return the ring buffers that an op writes, of every ring group."""
        every = zip(self.rings, carry.rings)
        return tuple(rings.written_by(arrays, op) for rings, arrays in every)

    def _with_written(
        self, carry: Carry, op: Op, written: tuple[RingArrays, ...]
    ) -> tuple[RingArrays, ...]:
        """Return all ring buffers, with those that an op has written replaced by `written`."""
        every = zip(self.rings, carry.rings, written)
        return tuple(rings.with_written(arrays, op, new) for rings, arrays, new in every)


def transfers_of(step: StepData) -> Transfers:
    """Return the messages between pipeline ranks in a step."""
    return Transfers(step.tables, step.poison, step.execution.printer)


def _run_forward(step: StepData, forward: Callable[[], ForwardOutputs]) -> ForwardOutputs:
    """Return `forward()`, in phases if layers run in halves."""
    return run_in_phases(forward) if step.execution.overlap_halves else forward()


def _action_inputs(step: StepData, row: TableRow, rows: Tree) -> ActionInputs:
    return ActionInputs(row, rows, step.variables, step.aux, step.embed_head_of_layers)


def _read_sums(carry: Carry) -> str:
    """Return the field to which layers add their gradients at embedding and head.

    With the vocabulary sharded over pp, layers read what embedding and head have shards of.
    """
    return "embed_head_gradients" if carry.read_gradients is None else "read_gradients"
