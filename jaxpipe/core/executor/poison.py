"""Write NaN to every slot after its last read, so that any later read shows in the results."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.ring_buffers import RingArrays, RingBuffers
from jaxpipe.core.schedule import Op, TableRow, Tables


def poison_read_slots(
    carry: Carry, row: TableRow, tables: Tables, rings: Sequence[RingBuffers]
) -> Carry:
    """Return the carry at the end of a tick, with poison in the slots whose last read this was.

    `rings` are the ring buffers of every ring group.
    """
    inbox = buffers.poison_slot(carry.inbox, row.x_read)
    carry = carry._replace(inbox=buffers.poison_slot(inbox, row.dy_read))
    if not tables.has_gradients:
        return carry
    if tables.slots.embed:
        carry = carry._replace(embed_ring=buffers.poison_slot(carry.embed_ring, row.dx_read))

    def ran(*ops: Op) -> jax.Array:
        """Whether the cell runs a gradient action with one of these ops."""
        flags = [row.chunk_column(op) > 0 for op in ops]
        flags += [row.pair == i + 1 for i, pair in enumerate(tables.pairs) if pair.op in ops]
        return jnp.stack(flags).any()

    if tables.slots.head:
        waited = lax.cond(
            row.head_weight > 0,
            lambda: buffers.poison_slot(carry.head_ring, row.head_read),
            lambda: carry.head_ring,
        )
        carry = carry._replace(head_ring=waited)
    waits = [
        ("for_b", row.for_b_read, ran(Op.B, Op.BW)),
        ("for_w", row.for_w_read, ran(Op.W, Op.BW)),
    ]
    if tables.has_split_backward:
        waits.append(("stash", row.stash_read, ran(Op.W)))
    if row.recompute is not None:
        waits.append(("for_r", row.recompute.for_r_read, row.recompute.chunk > 0))

    def emptied(ring: RingBuffers, arrays: RingArrays) -> RingArrays:
        for use, slot, has_run in waits:
            poisoned = partial(ring.poison, arrays, use, slot)
            arrays = lax.cond(has_run, poisoned, lambda arrays=arrays: arrays)
        return arrays

    return carry._replace(rings=tuple(map(emptied, rings, carry.rings)))
