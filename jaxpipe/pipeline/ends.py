"""The ends of the model in a tick: embedding and loss, by one rank alone or by all together."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.contract import Context, StageFunctions
from jaxpipe.parallel import PP
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.messages import MessagePrinter
from jaxpipe.pipeline.split import Cotangent, LayerSplit
from jaxpipe.pipeline.stage import SharedPart
from jaxpipe.schedule import Row, Tables

Tree = Any


class Mean(NamedTuple):
    """How a sum of losses becomes a mean over the whole batch.

    Attributes:
      share: one over the number of its terms; 0 where there are none.
      seed: the gradient at the sum.
    """

    share: jax.Array
    seed: jax.Array

    def recorded(self, losses: jax.Array, loss: jax.Array, m: jax.Array) -> jax.Array:
        """Losses `[M, ...]` with a microbatch's share of the mean added."""
        return losses.at[m].add((loss * self.share).astype(losses.dtype))


@dataclass(frozen=True)
class StepData:
    """What no tick changes, on one rank.

    Attributes:
      tables: what every tick does.
      shared: the leaves that no layer has, as ops read them.
      batch: leaves `[M, B, ...]`.
      variables: the model's state that is no parameter.
      loss: shape and dtype of what the head returns.
      outputs: shapes and dtypes of what the model gives back of a microbatch.
      head: the mean of the head's losses over the batch's terms.
      aux: the mean of the layers' losses over the batch's tokens.
      counts: the terms of the head's losses in each microbatch, of all replicas, `[M]`.
      unscale: what the sums of gradients are multiplied with at the end; None: nothing.
      poison: whether idle messages and free slots are to hold NaN.
      printer: what prints messages; None: nothing does.
    """

    tables: Tables
    shared: Tree
    batch: Tree
    variables: Tree
    loss: jax.ShapeDtypeStruct
    outputs: Tree
    head: Mean
    aux: Mean
    counts: jax.Array
    unscale: jax.Array | None
    poison: bool
    printer: MessagePrinter | None = None

    def rows(self, m: jax.Array) -> Tree:
        """A microbatch's row data."""
        return buffers.read(self.batch, m)

    def choose(
        self, flag: Callable[[Row], Any], row: Row, yes: Callable[[], Tree], no: Callable[[], Tree]
    ) -> Tree:
        """One of two values by a flag of the row; the other alone where no row raises it.

        A branch that is never taken has memory of its own all the same.
        """
        if not np.any(flag(self.tables.columns)):
            return no()
        return lax.cond(flag(row), yes, no)


@dataclass(frozen=True)
class Ends(ABC):
    """Embedding and head of a rank's program; a forward-only pass has no `split` of the head."""

    functions: StageFunctions
    embed: SharedPart
    head: SharedPart
    split: LayerSplit | None
    step: StepData

    @abstractmethod
    def after_receiving(self, carry: Carry, row: Row) -> Carry:
        """What stands before the actions of a tick."""

    @abstractmethod
    def after_forward(self, carry: Carry, row: Row) -> Carry:
        """What follows F."""

    @abstractmethod
    def after_gradient(self, carry: Carry, row: Row) -> Carry:
        """What follows B, W or BW."""

    def _loss(self, y: jax.Array, rows: Tree, totals: Tree) -> tuple[jax.Array, jax.Array, Tree]:
        """Loss, the gradient at y, and the totals with the head's gradients added."""
        if self.split is None:
            return self.functions.head(self.step.shared, y, rows), y, totals
        params, context = self.head.pick(self.step.shared), Context(rows)
        output, kept = self.split.forward(params, y, context)
        dy, used = self.split.backward(params, context, kept, self._seed(output.y))
        return output.y, dy.value, self.head.add(totals, used)

    def _with_outputs(self, outputs: Tree, y: jax.Array, m: jax.Array, here: Any = True) -> Tree:
        """What the model gives back, with that of a microbatch added on the rank that is `here`."""
        if self.functions.outputs is None:
            return outputs
        made = self.functions.outputs(self.step.shared, y, self.step.rows(m))
        return jax.tree.map(
            lambda every, own: buffers.write(every, jnp.where(here, own, 0), m), outputs, made
        )

    def _seed(self, loss: jax.Array) -> Cotangent:
        return Cotangent(jnp.broadcast_to(self.step.head.seed.astype(loss.dtype), loss.shape))

    def _embed_gradient(self, dx: jax.Array, rows: Tree, totals: Tree) -> Tree:
        """The totals with the embedding's gradients added."""
        return self.embed.add(totals, self.embed.gradients(self.step.shared, rows, dx))


class OwnEnds(Ends):
    """Ends that the ranks of the first and last stages compute, where their F and B are."""

    def after_receiving(self, carry: Carry, row: Row) -> Carry:
        """Before the actions of a tick: nothing."""
        return carry

    def after_forward(self, carry: Carry, row: Row) -> Carry:
        """The loss after the last layer; the gradient it leaves takes the place of y."""
        m = row.forward_mb

        def run() -> tuple[jax.Array, jax.Array, Tree, Any, Tree]:
            rows, outputs = self.step.rows(m), self._with_outputs(carry.outputs, carry.y, m)
            if self.step.tables.slots.head:
                loss, dy, gradients, ring = self._loss_without_weights(carry, rows, row)
            else:
                loss, dy, gradients = self._loss(carry.y, rows, carry.shared_gradients)
                ring = carry.for_head
            return self.step.head.recorded(carry.losses, loss, m), dy, gradients, ring, outputs

        passed = carry.losses, carry.y, carry.shared_gradients, carry.for_head, carry.outputs
        losses, y, gradients, ring, outputs = self.step.choose(
            lambda row: row.head, row, run, lambda: passed
        )
        return carry._replace(
            losses=losses, y=y, shared_gradients=gradients, for_head=ring, outputs=outputs
        )

    def after_gradient(self, carry: Carry, row: Row) -> Carry:
        """What has waited of the head's gradients, and the embedding's."""
        if self.step.tables.slots.head:
            carry = self._head_weight(carry, row)
        return self._gradient_of_embedding(carry, row) if self.step.tables.trains else carry

    def _loss_without_weights(
        self, carry: Carry, rows: Tree, row: Row
    ) -> tuple[jax.Array, jax.Array, Tree, Any]:
        """Loss, gradient at y, totals, and the ring with what the head's matrices wait for."""
        params, context = self.head.pick(self.step.shared), Context(rows)
        output, kept = self.split.forward(params, carry.y, context)
        dy, used, stash = self.split.backward_input(params, context, kept, self._seed(output.y))
        ring = buffers.write(carry.for_head, (kept.for_w, stash), row.head_write)
        return output.y, dy.value, self.head.add(carry.shared_gradients, used), ring

    def _head_weight(self, carry: Carry, row: Row) -> Carry:
        """The gradients of the head's matrices, where they have waited for W."""

        def run() -> Tree:
            context = Context(self.step.rows(row.gradient_mb))
            for_w, stash = buffers.read(carry.for_head, row.head_read)
            params = self.head.pick(self.step.shared)
            used = self.split.backward_weight(params, context, for_w, stash)
            return self.head.add(carry.shared_gradients, used)

        gradients = self.step.choose(
            lambda row: row.head_weight, row, run, lambda: carry.shared_gradients
        )
        return carry._replace(shared_gradients=gradients)

    def _gradient_of_embedding(self, carry: Carry, row: Row) -> Carry:
        """From the dx of stage 0, just made or kept until W."""
        waited = self.step.tables.slots.embed
        if waited:
            ring = buffers.write(carry.for_embed, carry.dx, row.dx_write)
            carry = carry._replace(for_embed=ring)

        def run() -> Tree:
            dx = buffers.read(carry.for_embed, row.dx_read) if waited else carry.dx
            rows, totals = self.step.rows(row.gradient_mb), carry.shared_gradients
            if row.steps is not None:
                totals = self.embed.begun(totals, row.steps.embeds > 0)
            return self._embed_gradient(dx, rows, totals)

        gradients = self.step.choose(
            lambda row: row.embed_gradient, row, run, lambda: carry.shared_gradients
        )
        return carry._replace(shared_gradients=gradients)


class SharedEnds(Ends):
    """Ends of which every rank computes a part of the vocabulary, all in the same tick.

    The functions' collectives run over pp inside conds that all ranks enter alike: their columns
    are the same on every rank. What one rank made is first brought to all, as a sum with zeros, and
    what one rank will read is stored in its inbox.
    """

    def after_receiving(self, carry: Carry, row: Row) -> Carry:
        """The loss and the embedding's gradient of what was made last; the embedding for now."""
        tables = self.step.tables
        for k, rank in enumerate(tables.last_ranks):
            carry = self._head_of(rank, carry, row, k)
        for k, rank in enumerate(tables.first_ranks):
            if tables.trains:
                carry = self._embed_gradient_of(rank, carry, row, k)
            carry = self._embed_for(rank, carry, row, k)
        return carry

    def after_forward(self, carry: Carry, row: Row) -> Carry:
        """After F: nothing."""
        return carry

    def after_gradient(self, carry: Carry, row: Row) -> Carry:
        """After B, W or BW: nothing."""
        return carry

    def _head_of(self, rank: int, carry: Carry, row: Row, k: int) -> Carry:
        """The loss of the y that a rank made, and the gradient at it for that rank's B."""
        m, slot = row.ends.head[k] - 1, row.ends.dy_write

        def run() -> tuple[jax.Array, jax.Array, Tree, Tree]:
            here = lax.axis_index(PP) == rank
            y = _from_rank(here, carry.y)
            loss, dy, gradients = self._loss(y, self.step.rows(m), carry.shared_gradients)
            losses = self.step.head.recorded(carry.losses, jnp.where(here, loss, 0), m)
            outputs = self._with_outputs(carry.outputs, y, m, here)
            return losses, self._stored(carry.inbox, dy, here, slot), gradients, outputs

        passed = carry.losses, carry.inbox, carry.shared_gradients, carry.outputs
        losses, inbox, gradients, outputs = self.step.choose(
            lambda row: row.ends.head[k] > 0, row, run, lambda: passed
        )
        return carry._replace(
            losses=losses, inbox=inbox, shared_gradients=gradients, outputs=outputs
        )

    def _embed_gradient_of(self, rank: int, carry: Carry, row: Row, k: int) -> Carry:
        """From the dx of stage 0 that a rank made."""
        m = row.ends.embed_gradient[k] - 1

        def run() -> Tree:
            dx = _from_rank(lax.axis_index(PP) == rank, carry.dx)
            return self._embed_gradient(dx, self.step.rows(m), carry.shared_gradients)

        gradients = self.step.choose(
            lambda row: row.ends.embed_gradient[k] > 0, row, run, lambda: carry.shared_gradients
        )
        return carry._replace(shared_gradients=gradients)

    def _embed_for(self, rank: int, carry: Carry, row: Row, k: int) -> Carry:
        """The embedding for an F of this tick, for the rank that runs it."""
        m, slot = row.ends.embed[k] - 1, row.ends.embed_write

        def run() -> jax.Array:
            x = self.functions.embed(self.step.shared, self.step.rows(m))
            return self._stored(carry.inbox, x, lax.axis_index(PP) == rank, slot)

        inbox = self.step.choose(lambda row: row.ends.embed[k] > 0, row, run, lambda: carry.inbox)
        return carry._replace(inbox=inbox)

    def _stored(
        self, inbox: jax.Array, value: jax.Array, here: jax.Array, slot: jax.Array
    ) -> jax.Array:
        """The inbox with a value in a slot of the rank that is `here`."""
        return buffers.write(inbox, value, jnp.where(here, slot, self.step.tables.slots.inbox))


def _from_rank(here: jax.Array, value: jax.Array) -> jax.Array:
    """What the rank that is `here` has, on all ranks."""
    return lax.psum(jnp.where(here, value, 0), PP)
