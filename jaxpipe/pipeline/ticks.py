"""All ticks of a step: one scan, but for the last ones where sums over replicas run beside them.

What a step adds up of gradients is summed over replicas once. Behind the scan nothing is left that
could hide it, and in the scan a tick that did so would be a branch of its own which adds to the
same sums, so that XLA copies them. The last tick with a gradient can stand behind the scan instead,
where it needs no branch: ranks that have none in it, and would wait, compute one that counts
nothing. XLA then reduces the sums of a layer while those before it compute. Sums of chunks that
have no gradient in that tick are reduced from its begin on.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.tick import RankWork
from jaxpipe.schedule import Row, Tables


def closing_tick(tables: Tables, execution: Execution) -> int | None:
    """The tick from which on all stand behind the scan; None: all are in it.

    It is the last that has a gradient, if that is of one chunk and op on all ranks that have one,
    and no stage is on two ranks, which first add up what they have.

    >>> from jaxpipe.schedule import build, lower
    >>> names, how = ("1f1b", "zb_h1", "zbv", "dualpipe"), Execution(overlap_sums=True)
    >>> [closing_tick(lower(build(name, pp=2, microbatches=4)), how) for name in names]
    [9, 12, 24, None]
    """
    columns = tables.columns
    ticks = np.flatnonzero((columns.W + columns.BW + columns.pair).any(axis=1))
    if not (execution.overlap_sums and ticks.size) or len(tables.first_ranks) > 1:
        return None
    alone = _of_tick(tables, last := int(ticks[-1]))
    return last if len(alone.gradients) == 1 and not alone.pairs else None


def run_ticks(work: RankWork, carry: Carry, rows: Row, closing: int | None) -> Carry:
    """What the last tick leaves; `rows` are this rank's columns of the tables, `[T]`.

    With a `closing` tick the sums of the layers' gradients are then reduced.
    """
    if work.step.printer is not None:
        rows = rows._replace(tick=jnp.arange(work.step.tables.ticks))
    scanned = rows if closing is None else jax.tree.map(lambda column: column[:closing], rows)
    carry, _ = lax.scan(lambda carry, row: (work.tick(carry, row), None), carry, scanned)
    if closing is None:
        return carry
    for tick, alone in _after(work, closing):
        if alone.closing:
            carry = _others_reduced(alone, carry)
        carry = alone.tick(carry, jax.tree.map(lambda column, at=tick: column[at], rows))
    return carry


def _after(work: RankWork, closing: int) -> Iterator[tuple[int, RankWork]]:
    """The closing tick and those after it, each with the work of that tick alone."""
    for tick in range(closing, work.step.tables.ticks):
        step = replace(work.step, tables=_of_tick(work.step.tables, tick))
        ends = replace(work.ends, step=step)
        yield tick, replace(work, step=step, ends=ends, closing=tick == closing)


def _of_tick(tables: Tables, tick: int) -> Tables:
    """The tables of one tick, with the buffers of all."""
    columns = jax.tree.map(lambda column: column[tick : tick + 1], tables.columns)
    return replace(tables, columns=columns, pairs=tables.pairs if columns.pair.any() else ())


def _others_reduced(work: RankWork, carry: Carry) -> Carry:
    """The sums of the chunks that have no gradient any more are reduced."""
    left = {chunk for _, chunk in work.step.tables.gradients}
    sums = [
        totals if chunk in left else work.chunks[chunk].reduced(totals)
        for chunk, totals in enumerate(carry.layer_gradients)
    ]
    return carry._replace(layer_gradients=tuple(sums))
