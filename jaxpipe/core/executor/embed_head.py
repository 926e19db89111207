"""Embedding and head in a tick: on the end stages, or vocabulary-parallel on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract import Context, Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.stage import EmbedHeadFunction, add_gradients
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.mesh import PP
from jaxpipe.core.schedule import TableRow
from jaxpipe.core.schedule.row import VocabParallelColumns
from jaxpipe.core.split.ports import Cotangent
from jaxpipe.core.split.split import LayerSplit


@dataclass(frozen=True)
class EmbedHead:
    """Embedding and head of a device's program.

    They run on the pipeline ranks of the first and last stage, next to F and B (`run_head` and
    `run_weight_gradients`), or with the vocabulary sharded over pp on all of them together
    (`run_on_all_ranks`). In the latter case the collectives over pp run inside conds that all
    pipeline ranks enter together, because the columns of these conds are equal on every rank. The
    input is broadcast from the rank that has it (by an all-reduce with zeros); the rank that reads
    a result stores it in its inbox.

    Attributes:
      embed, head: the model's functions.
      outputs: `StageFunctions.outputs`.
      split_if_trained: the split head; None: forward-only.
      reduce: reduces gradient sums over the mesh to this device's shards; None stays None.
    """

    embed: EmbedHeadFunction
    head: EmbedHeadFunction
    outputs: Callable[..., Tree] | None
    split_if_trained: LayerSplit | None
    reduce: Callable[[Tree], Tree]

    @property
    def split(self) -> LayerSplit:
        """The head split into F, B and W; a forward-only pass has none."""
        assert self.split_if_trained is not None
        return self.split_if_trained

    def grows(self, columns: TableRow) -> Tree:
        """Return whether ticks with these columns add to each gradient sum of embedding or head."""
        of_all_ranks = columns.vocab_parallel
        heads = [columns.head, columns.head_weight, *(of_all_ranks.head if of_all_ranks else ())]
        embeds = of_all_ranks.embed_gradient if of_all_ranks else (columns.embed_gradient,)
        head, embed = bool(np.any(heads)), bool(np.any(embeds))
        return jax.tree.map(
            lambda by_head, by_embed: (by_head and head) or (by_embed and embed),
            self.head.used, self.embed.used,
        )  # fmt: skip

    def result_shapes(
        self, step: StepData, x: Any, rows: Tree
    ) -> tuple[jax.ShapeDtypeStruct, Tree]:
        """Return shapes and dtypes of the loss and of the outputs of a microbatch.

        `x` and `rows` are shapes and dtypes of the head's inputs.
        """
        inputs = step.embed_head, x, rows
        loss = jax.eval_shape(self.head.function, *inputs)
        return loss, self.outputs and jax.eval_shape(self.outputs, *inputs)

    def run_head(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Compute the loss after the last layer; its gradient replaces y in the carry."""
        m = row.forward_mb

        def run() -> tuple[jax.Array, jax.Array, Tree, Any, Tree]:
            rows, outputs = step.rows(m), self._with_outputs(step, carry.outputs, carry.y, m)
            if step.tables.slots.head:
                loss, dy, gradients, ring = self._loss_without_weights(step, carry, rows, row)
            else:
                loss, dy, gradients = self._loss(step, carry.y, rows, carry.embed_head_gradients)
                ring = carry.head_ring
            return step.head.recorded(carry.losses, loss, m), dy, gradients, ring, outputs

        passed = carry.losses, carry.y, carry.embed_head_gradients, carry.head_ring, carry.outputs
        losses, y, gradients, ring, outputs = step.choose(
            lambda row: row.head, row, run, lambda: passed
        )
        return carry._replace(
            losses=losses, y=y, embed_head_gradients=gradients, head_ring=ring, outputs=outputs
        )

    def run_weight_gradients(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Compute the head's deferred weight gradients and the embedding's gradients."""
        if step.tables.slots.head:
            carry = self._run_head_weight(step, carry, row)
        return self._run_embed_gradient(step, carry, row) if step.tables.has_gradients else carry

    def _loss_without_weights(
        self, step: StepData, carry: Carry, rows: Tree, row: TableRow
    ) -> tuple[jax.Array, jax.Array, Tree, Any]:
        """Run F and B of the head: loss, gradient at y, totals, and `head_ring` for its W."""
        context = _context(step, rows)
        output, residuals = self.split.forward(None, carry.y, context)
        dy, used, stash = self.split.backward_input(None, context, residuals, _seed(step, output.y))
        ring = buffers.write(carry.head_ring, (residuals.for_w, stash), row.head_write)
        totals = add_gradients(carry.embed_head_gradients, used.embed_head)
        return output.y, dy.value, totals, ring

    def _run_head_weight(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Run W of the head where its weight gradients are deferred."""

        def run() -> Tree:
            context = _context(step, step.rows(row.gradient_mb))
            for_w, stash = buffers.read(carry.head_ring, row.head_read)
            used = self.split.backward_weight(None, context, for_w, stash)
            return add_gradients(carry.embed_head_gradients, used.embed_head)

        gradients = step.choose(
            lambda row: row.head_weight, row, run, lambda: carry.embed_head_gradients
        )
        return carry._replace(embed_head_gradients=gradients)

    def _run_embed_gradient(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Add the embedding's gradient, from this tick's dx of stage 0 or a deferred one."""
        deferred = step.tables.slots.embed
        if deferred:
            ring = buffers.write(carry.embed_ring, carry.dx, row.dx_write)
            carry = carry._replace(embed_ring=ring)

        def run() -> Tree:
            dx = buffers.read(carry.embed_ring, row.dx_read) if deferred else carry.dx
            rows = step.rows(row.gradient_mb)
            return self._embed_gradient(step, dx, rows, self.sums_before_embed_gradient(carry, row))

        gradients = step.choose(
            lambda row: row.embed_gradient, row, run, lambda: carry.embed_head_gradients
        )
        return carry._replace(embed_head_gradients=gradients)

    def sums_before_embed_gradient(self, carry: Carry, row: TableRow) -> Tree:
        """Return the gradient sums to which the embedding adds its gradient in a tick."""
        return carry.embed_head_gradients

    def run_on_all_ranks(self, step: StepData, carry: Carry, row: TableRow) -> Carry:
        """Compute loss and embedding gradient for the last tick, and the embedding for this one."""
        tables = step.tables
        for k, rank in enumerate(tables.last_ranks):
            carry = self._head_of(step, rank, carry, row, k)
        for k, rank in enumerate(tables.first_ranks):
            if tables.has_gradients:
                carry = self._embed_gradient_of(step, rank, carry, row, k)
            carry = self._embed_for(step, rank, carry, row, k)
        return carry

    def _head_of(self, step: StepData, rank: int, carry: Carry, row: TableRow, k: int) -> Carry:
        """Compute the loss of the y of a pipeline rank, and store dy for that rank's B."""
        m, slot = _columns(row).head[k] - 1, _columns(row).dy_write

        def run() -> tuple[jax.Array, jax.Array, Tree, Tree]:
            here = lax.axis_index(PP) == rank
            y = _from_rank(here, carry.y)
            loss, dy, gradients = self._loss(step, y, step.rows(m), carry.embed_head_gradients)
            losses = step.head.recorded(carry.losses, jnp.where(here, loss, 0), m)
            outputs = self._with_outputs(step, carry.outputs, y, m, here)
            return losses, _write_inbox(step, carry.inbox, dy, here, slot), gradients, outputs

        passed = carry.losses, carry.inbox, carry.embed_head_gradients, carry.outputs
        losses, inbox, gradients, outputs = step.choose(
            lambda row: _columns(row).head[k] > 0, row, run, lambda: passed
        )
        return carry._replace(
            losses=losses, inbox=inbox, embed_head_gradients=gradients, outputs=outputs
        )

    def _embed_gradient_of(
        self, step: StepData, rank: int, carry: Carry, row: TableRow, k: int
    ) -> Carry:
        """Add the embedding's gradient from the dx of stage 0 of a pipeline rank."""
        m = _columns(row).embed_gradient[k] - 1

        def run() -> Tree:
            dx = _from_rank(lax.axis_index(PP) == rank, carry.dx)
            return self._embed_gradient(step, dx, step.rows(m), carry.embed_head_gradients)

        gradients = step.choose(
            lambda row: _columns(row).embed_gradient[k] > 0, row, run,
            lambda: carry.embed_head_gradients,
        )  # fmt: skip
        return carry._replace(embed_head_gradients=gradients)

    def _embed_for(self, step: StepData, rank: int, carry: Carry, row: TableRow, k: int) -> Carry:
        """Compute the embedding for an F of this tick; the rank that runs the F stores it."""
        m, slot = _columns(row).embed[k] - 1, _columns(row).embed_write

        def run() -> jax.Array:
            x = self.embed.function(step.embed_head, step.rows(m))
            return _write_inbox(step, carry.inbox, x, lax.axis_index(PP) == rank, slot)

        inbox = step.choose(lambda row: _columns(row).embed[k] > 0, row, run, lambda: carry.inbox)
        return carry._replace(inbox=inbox)

    def _loss(
        self, step: StepData, y: jax.Array, rows: Tree, totals: Tree
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """Return the loss, the gradient at y, and `totals` with the head's gradients added."""
        if not step.tables.has_gradients:
            return self.head.function(step.embed_head, y, rows), y, totals
        context = _context(step, rows)
        output, residuals = self.split.forward(None, y, context)
        dy, used = self.split.backward(None, context, residuals, _seed(step, output.y))
        return output.y, dy.value, add_gradients(totals, used.embed_head)

    def _with_outputs(
        self, step: StepData, outputs: Tree, y: jax.Array, m: jax.Array, here: Any = True
    ) -> Tree:
        """Write the model outputs of microbatch m; zeros unless `here` is true on this rank."""
        if self.outputs is None:
            return outputs
        of_microbatch = self.outputs(step.embed_head, y, step.rows(m))
        return jax.tree.map(
            lambda ring, value: buffers.write(ring, jnp.where(here, value, 0), m),
            outputs, of_microbatch,
        )  # fmt: skip

    def _embed_gradient(self, step: StepData, dx: jax.Array, rows: Tree, totals: Tree) -> Tree:
        """Return `totals` with the embedding's gradients added."""
        return add_gradients(totals, self.embed.gradients(step.embed_head, rows, dx))


def _columns(row: TableRow) -> VocabParallelColumns:
    assert row.vocab_parallel is not None
    return row.vocab_parallel


def _context(step: StepData, rows: Tree) -> Context:
    """Return the context of the head, which is a layer without parameters."""
    return Context(rows, embed_head=step.embed_head)


def _seed(step: StepData, loss: jax.Array) -> Cotangent:
    return Cotangent(jnp.broadcast_to(step.head.seed.astype(loss.dtype), loss.shape))


def _write_inbox(
    step: StepData, inbox: jax.Array, value: jax.Array, here: jax.Array, slot: jax.Array
) -> jax.Array:
    """Write a value to an inbox slot where `here` is true, elsewhere to the dummy slot."""
    return buffers.write(inbox, value, jnp.where(here, slot, step.tables.slots.inbox))


def _from_rank(here: jax.Array, value: jax.Array) -> jax.Array:
    """Broadcast the value of the pipeline rank where `here` is true to all pipeline ranks."""
    return lax.psum(jnp.where(here, value, 0), PP)
