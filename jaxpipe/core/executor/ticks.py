"""All ticks of a step: one scan, and ticks before and after it that overlap collectives over dp.

Gradient sums are reduced over data-parallel replicas once per step. After the scan no compute is
left to hide the reduction, and inside the scan a tick with the reduction would be one more branch
that adds to the same sums, so that XLA copies them. With `overlap_sums` the last tick with a
gradient (the closing tick) runs after the scan, in no branch: pipeline ranks without a gradient in
it, which would idle, compute one that is discarded, without the layers that are in a cond. XLA
then reduces the sums of a layer while the backward of earlier layers computes. Sums that are
complete before the closing tick, as those of the head and of chunks without a gradient in it, are
reduced from its start.

All-gathers of parameters before the scan have nothing to overlap with, either. So the first tick
with an F (the opening tick) runs before the scan, in no branch: its F gathers each layer while it
computes the layer before, and the scan reads what it has gathered. Pipeline ranks without an F in
that tick, which would idle, compute one that is discarded. Ticks before it are empty and left out.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.mesh.flags import merge, select
from jaxpipe.core.schedule import TableRow, Tables


def closing_tick(tables: Tables, execution: Execution) -> int | None:
    """Return the closing tick, the first that runs after the scan; None: the scan runs all ticks.

    It is the last tick with W, BW or a pair. There is none if several chunks or ops have a gradient
    in that tick, or if stages are on two pipeline ranks (DualPipe), whose gradient sums must be
    added first.

    >>> from jaxpipe.core.schedule import dualpipe, one_f_one_b, zb_h1, zbv_order
    >>> from jaxpipe.core.schedule import lower
    >>> orders, how = (one_f_one_b, zb_h1, zbv_order, dualpipe), Execution(overlap_sums=True)
    >>> [closing_tick(lower(build(pp=2, microbatches=4)), how) for build in orders]
    [9, 12, 24, None]
    """
    columns = tables.columns
    ticks = np.flatnonzero((columns.W + columns.BW + columns.pair).any(axis=1))
    if not (execution.overlap_sums and ticks.size) or len(tables.first_ranks) > 1:
        return None
    alone = _of_tick(tables, last := int(ticks[-1]))
    return last if len(alone.gradients) == 1 and not alone.pairs else None


def opening_tick(tables: Tables, execution: Execution) -> int | None:
    """Return the opening tick, which runs before the scan; None: the scan begins with tick 0.

    There is none if the first tick with an F has other actions, too, or if stages are on two
    pipeline ranks (DualPipe), which send each other gathered parameters.

    >>> from jaxpipe.core.schedule import Lockstep, lower, one_f_one_b
    >>> schedule = one_f_one_b(pp=2, microbatches=4)
    >>> tables = [lower(schedule, Lockstep(phases=phases)) for phases in (1, 2)]
    >>> [opening_tick(one, Execution(overlap_sums=True, zero_stage=1)) for one in tables]
    [0, 1]
    """
    if not (execution.overlap_sums and execution.zero_stage) or len(tables.first_ranks) > 1:
        return None
    first = int(np.flatnonzero((tables.columns.F + tables.columns.pair).any(axis=1))[0])
    alone = _of_tick(tables, first)
    others = alone.gradients or alone.pairs or alone.recomputations or alone.columns.head.any()
    return first if alone.forwards == [0] and tables.has_gradients and not others else None


def run_ticks(
    work: DeviceWork,
    step: StepData,
    carry: Carry,
    rows: TableRow,
    closing: int | None,
    opening: tuple[int, Chunk] | None = None,
) -> Carry:
    """Run all ticks and return the last carry; `rows` are this rank's table columns, `[T]`.

    With a `closing` tick, the gradient sums of layers are returned reduced over replicas. `opening`
    is the opening tick, and its chunk with parameters that are shards.
    """
    if step.execution.printer is not None:
        rows = rows._replace(tick=jnp.arange(step.tables.ticks))
    begin = 0
    if opening is not None:
        first, chunk = opening
        row = jax.tree.map(lambda column: column[first], rows)
        of_tick = replace(step, tables=_of_tick(step.tables, first))
        work, carry = work.first_tick(of_tick, carry, row, chunk)
        begin = first + 1
    if closing is None:
        rows = jax.tree.map(lambda column: column[begin:], rows)
        return lax.scan(lambda carry, row: (work.tick(step, carry, row), None), carry, rows)[0]

    def tick_with(carried: tuple[Carry, Tree], row: TableRow) -> tuple[tuple[Carry, Tree], None]:
        carry, params = carried
        # Without the barrier XLA sees that the loop changes no parameter. It then keeps the loop's
        # inputs for the ticks after it, beside a transposed copy that the loop's fp8 products read.
        carry = work.with_params(params).tick(step, carry, row)
        return (carry, lax.optimization_barrier(params)), None

    scanned = jax.tree.map(lambda column: column[begin:closing], rows)
    (carry, params), _ = lax.scan(tick_with, (carry, work.params), scanned)
    work, early = work.with_params(params), early_sums(work, step.tables, closing)
    for tick in range(closing, step.tables.ticks):
        of_tick = replace(step, tables=_of_tick(step.tables, tick))
        if tick == closing:
            carry = _others_reduced(work, of_tick.tables, early, carry)
        row = jax.tree.map(lambda column, at=tick: column[at], rows)
        carry = replace(work, closing=tick == closing).tick(of_tick, carry, row)
    return carry


def early_sums(work: DeviceWork, tables: Tables, closing: int) -> Tree:
    """Return whether each gradient sum of embedding and head is complete before the closing tick.

    Those that layers add to are not.
    """
    flags = [work.embed_head.grows(jax.tree.map(lambda column: column[closing:], tables.columns))]
    flags += [kind.split.uses_of_embed_head for kind in work.kinds if kind.kind.reads]
    return jax.tree.map(lambda *grows: not any(grows), *flags)


def _of_tick(tables: Tables, tick: int) -> Tables:
    """Return tables with one tick only; buffer sizes stay those of all ticks."""
    columns = jax.tree.map(lambda column: column[tick : tick + 1], tables.columns)
    return replace(tables, columns=columns, pairs=tables.pairs if columns.pair.any() else ())


def _others_reduced(work: DeviceWork, closing: Tables, early: Tree, carry: Carry) -> Carry:
    """Reduce the gradient sums that the closing tick leaves as they are.

    They are those of all chunks without a gradient in its tables, and of embedding and head those
    with a flag in `early`.
    """
    in_closing_tick = {chunk for _, chunk in closing.gradients}
    sums = [
        totals if chunk in in_closing_tick else work.chunks[chunk].reduce(totals)
        for chunk, totals in enumerate(carry.layer_gradients)
    ]
    shared = carry.embed_head_gradients
    shared = merge(early, work.embed_head.reduce(select(early, shared)), shared)
    return carry._replace(layer_gradients=tuple(sums), embed_head_gradients=shared)
