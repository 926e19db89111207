"""The ends of the model in a tick: embedding and loss, by one rank alone or by all together."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel import PP
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.split import LayerSplit
from jaxpipe.pipeline.stage import SharedPart, StageFunctions
from jaxpipe.schedule import Row, Tables

Tree = Any


@dataclass(frozen=True)
class Ends:
    """Embedding and head of a rank's program.

    `batch` has leaves `[M, B, ...]`. `share` is one over the number of terms in the whole batch,
    `seed` the loss's cotangent. A forward-only pass has no `split` of the head.
    """

    functions: StageFunctions
    embed: SharedPart
    head: SharedPart
    split: LayerSplit | None
    shared: Tree
    batch: Tree
    share: jax.Array
    seed: jax.Array
    tables: Tables

    def _microbatch(self, m: jax.Array) -> Tree:
        return buffers.read(self.batch, m)

    def _loss(
        self, y: jax.Array, microbatch: Tree, totals: Tree
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """Loss, the gradient at y, and the totals with the head's gradients added."""
        if self.split is None:
            return self.functions.head(self.shared, y, microbatch), y, totals
        params = self.head.pick(self.shared)
        loss, kept = self.split.forward(params, y, microbatch)
        dy, used = self.split.backward(params, microbatch, kept, self.seed.astype(loss.dtype))
        return loss, dy, self.head.add(totals, used)

    def _embed_gradient(self, dx: jax.Array, microbatch: Tree, totals: Tree) -> Tree:
        """The totals with the embedding's gradients added."""
        return self.embed.add(totals, self.embed.gradients(self.shared, microbatch, dx))

    def _record(self, losses: jax.Array, loss: jax.Array, m: jax.Array) -> jax.Array:
        return losses.at[m].set((loss * self.share).astype(losses.dtype))


class OwnEnds(Ends):
    """Ends that the ranks of the first and last stages compute, where their F and B are."""

    def after_receiving(self, carry: Carry, row: Row) -> Carry:
        """Before the actions of a tick: nothing."""
        return carry

    def after_forward(self, carry: Carry, row: Row) -> Carry:
        """The loss after the last layer; the gradient it leaves takes the place of y."""
        m = row.forward_mb

        def run() -> tuple[jax.Array, jax.Array, Tree, Any]:
            microbatch = self._microbatch(m)
            if self.tables.slots.head:
                loss, dy, gradients, ring = self._loss_without_weights(carry, microbatch, row)
            else:
                loss, dy, gradients = self._loss(carry.y, microbatch, carry.shared_gradients)
                ring = carry.for_head
            return self._record(carry.losses, loss, m), dy, gradients, ring

        passed = carry.losses, carry.y, carry.shared_gradients, carry.for_head
        losses, y, gradients, ring = lax.cond(row.head, run, lambda: passed)
        return carry._replace(losses=losses, y=y, shared_gradients=gradients, for_head=ring)

    def after_gradient(self, carry: Carry, row: Row) -> Carry:
        """What has waited of the head's gradients, and the embedding's."""
        if self.tables.slots.head:
            carry = self._head_weight(carry, row)
        return self._gradient_of_embedding(carry, row) if self.tables.trains else carry

    def _loss_without_weights(
        self, carry: Carry, microbatch: Tree, row: Row
    ) -> tuple[jax.Array, jax.Array, Tree, Any]:
        """Loss, gradient at y, totals, and the ring with what the head's matrices wait for."""
        params = self.head.pick(self.shared)
        loss, kept = self.split.forward(params, carry.y, microbatch)
        seed = self.seed.astype(loss.dtype)
        dy, used, stash = self.split.backward_input(params, microbatch, kept, seed)
        ring = buffers.write(carry.for_head, (kept.for_w, stash), row.head_write)
        return loss, dy, self.head.add(carry.shared_gradients, used), ring

    def _head_weight(self, carry: Carry, row: Row) -> Carry:
        """The gradients of the head's matrices, where they have waited for W."""

        def run() -> Tree:
            microbatch = self._microbatch(row.gradient_mb)
            for_w, stash = buffers.read(carry.for_head, row.head_read)
            used = self.split.backward_weight(self.head.pick(self.shared), microbatch, for_w, stash)
            return self.head.add(carry.shared_gradients, used)

        gradients = lax.cond(row.head_weight, run, lambda: carry.shared_gradients)
        return carry._replace(shared_gradients=gradients)

    def _gradient_of_embedding(self, carry: Carry, row: Row) -> Carry:
        """From the dx of stage 0, just made or kept until W."""
        waited = self.tables.slots.embed
        if waited:
            ring = buffers.write(carry.for_embed, carry.dx, row.dx_write)
            carry = carry._replace(for_embed=ring)

        def run() -> Tree:
            dx = buffers.read(carry.for_embed, row.dx_read) if waited else carry.dx
            microbatch = self._microbatch(row.gradient_mb)
            return self._embed_gradient(dx, microbatch, carry.shared_gradients)

        gradients = lax.cond(row.embed_gradient, run, lambda: carry.shared_gradients)
        return carry._replace(shared_gradients=gradients)


class SharedEnds(Ends):
    """Ends of which every rank computes a part of the vocabulary, all in the same tick.

    The functions' collectives run over pp inside conds that all ranks enter alike: their columns
    are the same on every rank. What one rank made is first brought to all, as a sum with zeros, and
    what one rank will read is stored in its inbox.
    """

    def after_receiving(self, carry: Carry, row: Row) -> Carry:
        """The loss and the embedding's gradient of what was made last; the embedding for now."""
        tables, ends = self.tables, row.ends
        for rank, which in zip(tables.last_ranks, ends.head):
            carry = self._head_of(rank, carry, which, ends.dy_write)
        for rank, which, returned in zip(tables.first_ranks, ends.embed, ends.embed_gradient):
            if tables.trains:
                carry = self._embed_gradient_of(rank, carry, returned)
            carry = self._embed_for(rank, carry, which, ends.embed_write)
        return carry

    def after_forward(self, carry: Carry, row: Row) -> Carry:
        """After F: nothing."""
        return carry

    def after_gradient(self, carry: Carry, row: Row) -> Carry:
        """After B, W or BW: nothing."""
        return carry

    def _head_of(self, rank: int, carry: Carry, which: jax.Array, slot: jax.Array) -> Carry:
        """The loss of the y that a rank made, and the gradient at it for that rank's B."""
        m = which - 1

        def run() -> tuple[jax.Array, jax.Array, Tree]:
            here = lax.axis_index(PP) == rank
            y = _from_rank(here, carry.y)
            loss, dy, gradients = self._loss(y, self._microbatch(m), carry.shared_gradients)
            losses = self._record(carry.losses, jnp.where(here, loss, 0), m)
            return losses, self._stored(carry.inbox, dy, here, slot), gradients

        passed = carry.losses, carry.inbox, carry.shared_gradients
        losses, inbox, gradients = lax.cond(which > 0, run, lambda: passed)
        return carry._replace(losses=losses, inbox=inbox, shared_gradients=gradients)

    def _embed_gradient_of(self, rank: int, carry: Carry, which: jax.Array) -> Carry:
        """From the dx of stage 0 that a rank made."""

        def run() -> Tree:
            dx = _from_rank(lax.axis_index(PP) == rank, carry.dx)
            return self._embed_gradient(dx, self._microbatch(which - 1), carry.shared_gradients)

        gradients = lax.cond(which > 0, run, lambda: carry.shared_gradients)
        return carry._replace(shared_gradients=gradients)

    def _embed_for(self, rank: int, carry: Carry, which: jax.Array, slot: jax.Array) -> Carry:
        """The embedding for an F of this tick, for the rank that runs it."""

        def run() -> jax.Array:
            x = self.functions.embed(self.shared, self._microbatch(which - 1))
            return self._stored(carry.inbox, x, lax.axis_index(PP) == rank, slot)

        return carry._replace(inbox=lax.cond(which > 0, run, lambda: carry.inbox))

    def _stored(
        self, inbox: jax.Array, value: jax.Array, here: jax.Array, slot: jax.Array
    ) -> jax.Array:
        """The inbox with a value in a slot of the rank that is `here`."""
        return buffers.write(inbox, value, jnp.where(here, slot, self.tables.slots.inbox))


def _from_rank(here: jax.Array, value: jax.Array) -> jax.Array:
    """What the rank that is `here` has, on all ranks."""
    return lax.psum(jnp.where(here, value, 0), PP)
