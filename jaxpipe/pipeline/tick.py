"""One tick on one rank: receive, F, head, gradient, embedding gradient.

Every buffer is written by exactly one two-way `lax.cond` whose other branch passes it on, and
within a tick it is written before it is read: so XLA updates all of them in place. Only arrivals
are written outside a cond; when nothing arrives, they go to a spare slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel.mesh import PP
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.split import LayerSplit, Residuals
from jaxpipe.pipeline.stage import SharedPart, StageFunctions
from jaxpipe.schedule import Tables

Tree = Any
Row = dict[str, jax.Array]  # the table's columns at this tick and rank, each a scalar


class Carry(NamedTuple):
    """What a rank hands from tick to tick. Rings are indexed by the tables' slots.

    `y`, `dx`: what this rank made last and sends next. `arriving`: with two-tick transfers, what
    the permutes of the last tick brought. `losses`: each microbatch's share of the loss, `[M]`.
    `dx`, `dy_ring`, `residuals` and the gradients are empty in a forward-only pass.
    """

    y: jax.Array
    dx: Any
    arriving: Any
    x_ring: jax.Array
    dy_ring: Any
    residuals: tuple[Residuals, ...]
    layer_gradients: tuple[Tree, ...]
    shared_gradients: Tree
    losses: jax.Array


@dataclass(frozen=True)
class RankWork:
    """One rank's functions and the values that no tick changes.

    `layers[j]` are slot j's parameters and `active[j]` whether this rank has a layer there (None:
    every rank does). `batch` has leaves `[M, B, ...]`. `seed` is the loss's cotangent: one over
    the number of terms in the whole batch. A forward-only pass has no `split`.
    """

    functions: StageFunctions
    embed: SharedPart
    head: SharedPart
    split: LayerSplit | None
    shared: Tree
    layers: tuple[Tree, ...]
    active: tuple[jax.Array | None, ...]
    batch: Tree
    seed: jax.Array
    poison: bool

    def first_carry(self, tables: Tables, x: jax.ShapeDtypeStruct, gradients: Tree) -> Carry:
        """Empty buffers; `gradients` gives the shapes and dtypes of the accumulators."""

        def ring(slots: int, like: Any) -> Any:
            return jax.tree.map(
                lambda leaf: buffers.make_ring(slots, leaf, poison=self.poison), like
            )

        message = jnp.full(x.shape, jnp.nan if self.poison else 0, x.dtype)
        microbatches = jax.tree.leaves(self.batch)[0].shape[0]
        carry = Carry(
            y=message,
            dx=None,
            arriving=(message, None) if tables.transfer_ticks == 2 else None,
            x_ring=ring(tables.x_slots + 1, x),
            dy_ring=None,
            residuals=(),
            layer_gradients=(),
            shared_gradients=None,
            losses=jnp.zeros(microbatches, self.seed.dtype),
        )
        if self.split is None:
            return carry
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), gradients)
        residuals = [ring(tables.residual_slots, self.split.residuals) for _ in self.layers]
        return carry._replace(
            dx=message,
            arriving=(message, message) if tables.transfer_ticks == 2 else None,
            dy_ring=ring(tables.dy_slots + 1, x),
            residuals=tuple(residuals),
            layer_gradients=zeros["layers"],
            shared_gradients=zeros["shared"],
        )

    def tick(self, carry: Carry, row: Row) -> Carry:
        """Run one row of the tables."""
        carry, row = self._receive(carry, row)
        carry = self._forward(carry, row)
        carry = self._head(carry, row)
        if self.split is not None:
            carry = self._gradient(carry, row)
            carry = self._embed_gradient(carry, row)
        return carry

    def _receive(self, carry: Carry, row: Row) -> tuple[Carry, Row]:
        """Send what was made last tick; store what arrives.

        One-tick transfers are complete before any cond starts: the barrier ties them to the row,
        from which every predicate comes. Without it XLA may put one permute between two conds, and
        neighbours then wait for each other in the middle of the tick. Two-tick transfers have the
        whole tick to arrive and are stored at the start of the next.
        """
        sent = (_send(carry.y, +1), None if carry.dx is None else _send(carry.dx, -1))
        if carry.arriving is None:
            (arrived, row), sent = lax.optimization_barrier((sent, row)), None
        else:
            arrived = carry.arriving
        x_ring = buffers.write(carry.x_ring, arrived[0], row["x_arrive"])
        dy_ring = carry.dy_ring
        if dy_ring is not None:
            dy_ring = buffers.write(dy_ring, arrived[1], row["dy_arrive"])
        return carry._replace(arriving=sent, x_ring=x_ring, dy_ring=dy_ring), row

    def _forward(self, carry: Carry, row: Row) -> Carry:
        """F: the embedding or a slot of the x ring, through the layers, leaving residuals."""

        def run() -> tuple[jax.Array, tuple[Residuals, ...]]:
            microbatch = buffers.read(self.batch, row["forward_mb"])
            x = lax.cond(
                row["embed"],
                lambda: self.functions.embed(self.shared, microbatch),
                lambda: buffers.read(carry.x_ring, row["x_read"]),
            )
            if self.split is None:
                for slot, params in enumerate(self.layers):
                    x = self._if_active(
                        slot,
                        lambda x, params=params: self.functions.layer(params, x, microbatch),
                        x,
                    )
                return x, ()
            rings = []
            for slot, params in enumerate(self.layers):

                def layer(
                    x: jax.Array, ring: Residuals, params: Tree = params
                ) -> tuple[jax.Array, Residuals]:
                    y, kept = self.split.forward(params, x, microbatch)
                    return y, buffers.write(ring, kept, row["residual_write"])

                x, ring = self._if_active(slot, layer, x, carry.residuals[slot])
                rings.append(ring)
            return x, tuple(rings)

        y, residuals = lax.cond(row["forward"], run, lambda: (self._idle(carry.y), carry.residuals))
        carry = carry._replace(y=y, residuals=residuals)
        return self._spoil(carry, row["forward"], x_ring=row["x_read"])

    def _head(self, carry: Carry, row: Row) -> Carry:
        """Loss of the microbatch whose last layer F has just run, and its output gradient."""
        m = row["forward_mb"]

        def run() -> tuple[jax.Array, Any, Tree]:
            microbatch = buffers.read(self.batch, m)
            if self.split is None:
                loss = self.functions.head(self.shared, carry.y, microbatch)
                return self._record(carry.losses, loss, m), None, None
            loss, pull = self.head.vjp(self.shared, carry.y, microbatch=microbatch)
            used, dy = pull(self.seed.astype(loss.dtype))
            ring = buffers.write(carry.dy_ring, dy, row["dy_write"])
            gradients = self.head.add(carry.shared_gradients, used)
            return self._record(carry.losses, loss, m), ring, gradients

        losses, dy_ring, gradients = lax.cond(
            row["head"], run, lambda: (carry.losses, carry.dy_ring, carry.shared_gradients)
        )
        return carry._replace(losses=losses, dy_ring=dy_ring, shared_gradients=gradients)

    def _gradient(self, carry: Carry, row: Row) -> Carry:
        """BW: back through the layers, adding to the parameters' gradients."""

        def run() -> tuple[jax.Array, tuple[Tree, ...]]:
            microbatch = buffers.read(self.batch, row["gradient_mb"])
            dy = buffers.read(carry.dy_ring, row["dy_read"])
            totals = list(carry.layer_gradients)
            for slot, params in reversed(list(enumerate(self.layers))):

                def layer(
                    dy: jax.Array, total: Tree, slot: int = slot, params: Tree = params
                ) -> tuple[jax.Array, Tree]:
                    kept = buffers.read(carry.residuals[slot], row["residual_read"])
                    dx, gradients = self.split.backward(params, microbatch, kept, dy)
                    return dx, jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)

                dy, totals[slot] = self._if_active(slot, layer, dy, totals[slot])
            return dy, tuple(totals)

        dx, totals = lax.cond(
            row["gradient"], run, lambda: (self._idle(carry.dx), carry.layer_gradients)
        )
        carry = carry._replace(dx=dx, layer_gradients=totals)
        return self._spoil(
            carry, row["gradient"], dy_ring=row["dy_read"], residuals=row["residual_read"]
        )

    def _embed_gradient(self, carry: Carry, row: Row) -> Carry:
        """The embedding's gradient from the dx that stage 0 has just made."""

        def run() -> Tree:
            microbatch = buffers.read(self.batch, row["gradient_mb"])
            _, pull = self.embed.vjp(self.shared, microbatch=microbatch)
            (used,) = pull(carry.dx)
            return self.embed.add(carry.shared_gradients, used)

        gradients = lax.cond(row["embed_gradient"], run, lambda: carry.shared_gradients)
        return carry._replace(shared_gradients=gradients)

    def _if_active(self, slot: int, layer: Callable[..., Any], x: jax.Array, *rings: Any) -> Any:
        """Run a slot's layer, or pass everything on where this rank has no layer there."""
        active = self.active[slot]
        if active is None:
            return layer(x, *rings)
        passed = (x, *rings) if rings else x
        return lax.cond(active, lambda: layer(x, *rings), lambda: passed)

    def _record(self, losses: jax.Array, loss: jax.Array, m: jax.Array) -> jax.Array:
        return losses.at[m].set((loss * self.seed).astype(losses.dtype))

    def _idle(self, message: jax.Array) -> jax.Array:
        """What is sent by a rank that made nothing: anything, since nobody stores it."""
        return jnp.full_like(message, jnp.nan) if self.poison else message

    def _spoil(self, carry: Carry, ran: jax.Array, **slots: jax.Array) -> Carry:
        """With poison, overwrite the slots of rings that this tick has read for the last time."""
        if not self.poison or self.split is None:
            return carry
        spoilt = {
            name: lax.cond(
                ran,
                lambda ring, slot: buffers.spoil(ring, slot),
                lambda ring, _: ring,
                getattr(carry, name),
                slot,
            )
            for name, slot in slots.items()
        }
        return carry._replace(**spoilt)


def _send(message: jax.Array, hop: int) -> jax.Array:
    """The message of the rank `hop` before this one round the ring."""
    size = lax.axis_size(PP)
    return lax.ppermute(message, PP, [(r, (r + hop) % size) for r in range(size)])
