"""Poison in every slot that has been read for the last time: what still reads it shows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.cut import Residuals
from jaxpipe.schedule import Op, Row, Tables

Tree = Any


def spoil(carry: Carry, row: Row, tables: Tables) -> Carry:
    """The carry at the end of a tick, with NaN where this tick was the last to read."""
    inbox = buffers.spoil(carry.inbox, row.x_read)
    carry = carry._replace(inbox=buffers.spoil(inbox, row.dy_read))
    if not tables.trains:
        return carry
    if tables.slots.embed:
        carry = carry._replace(for_embed=buffers.spoil(carry.for_embed, row.dx_read))

    def ran(*ops: Op) -> jax.Array:
        """Whether the cell's gradient is one of these."""
        flags = [row.chunk_of(op) > 0 for op in ops]
        flags += [row.pair == i + 1 for i, pair in enumerate(tables.pairs) if pair.op in ops]
        return jnp.stack(flags).any()

    def spoilt(rings: Tree, slot: jax.Array, when: jax.Array) -> Tree:
        return lax.cond(when, lambda: buffers.spoil(rings, slot), lambda: rings)

    if tables.slots.head:
        waited = spoilt(carry.for_head, row.head_read, row.head_weight > 0)
        carry = carry._replace(for_head=waited)
    if tables.splits:
        by_b = tuple(
            left._replace(stash=spoilt(left.stash, row.stash_read, ran(Op.W)))
            for left in carry.by_b
        )
        carry = carry._replace(by_b=by_b)
    by_f = tuple(
        left._replace(
            residuals=Residuals(
                spoilt(left.residuals.for_b, row.for_b_read, ran(Op.B, Op.BW)),
                spoilt(left.residuals.for_w, row.for_w_read, ran(Op.W, Op.BW)),
            )
        )
        for left in carry.by_f
    )
    return carry._replace(by_f=by_f)
