"""Poison in every slot that has been read for the last time: what still reads it shows."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.rings import RingPlan, Rings
from jaxpipe.schedule import Op, Row, Tables


def spoil(carry: Carry, row: Row, tables: Tables, plans: Sequence[RingPlan]) -> Carry:
    """The carry at the end of a tick, with NaN where this tick was the last to read.

    `plans` are those of the ring slots.
    """
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

    if tables.slots.head:
        waited = lax.cond(
            row.head_weight > 0,
            lambda: buffers.spoil(carry.for_head, row.head_read),
            lambda: carry.for_head,
        )
        carry = carry._replace(for_head=waited)
    waits = [("for_b", row.for_b_read, (Op.B, Op.BW)), ("for_w", row.for_w_read, (Op.W, Op.BW))]
    if tables.splits:
        waits.append(("stash", row.stash_read, (Op.W,)))

    def emptied(plan: RingPlan, rings: Rings) -> Rings:
        for use, slot, readers in waits:
            spoilt = partial(plan.spoil, rings, use, slot)
            rings = lax.cond(ran(*readers), spoilt, lambda rings=rings: rings)
        return rings

    return carry._replace(rings=tuple(map(emptied, plans, carry.rings)))
