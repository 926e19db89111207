"""Building blocks: ticks for each op of a microbatch that do not collide when repeated.

With ops of one tick a rank with C stages runs 3C ops per microbatch, so a block repeats every 3C
ticks. Along a run of stages in one direction, F of stage s + 1 follows F of stage s by a fixed
number of ticks, and so does B; a gap separates the runs. Two ops of a rank must differ modulo the
period; the remaining ticks are for W. A microbatch is live from F to B (W follows in the next free
tick), so these lifetimes give the memory (Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", section 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from jaxpipe.core.schedule.action import Placement

_TICKS = range(1, 5)  # of a hop in a run, and of a gap


@dataclass(frozen=True)
class BuildingBlock:
    """A building block.

    Attributes:
      phases: per rank, the ticks of F and the ticks of B of microbatch 0, one for each stage of the
        rank.
      period: ticks between consecutive microbatches.
      peak_live: the most (microbatch, stage) pairs that are live, from F to B, on any rank.
    """

    phases: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    period: int
    peak_live: int


@lru_cache(maxsize=8)  # many searches are for few placements
def enumerate_blocks(placement: Placement) -> tuple[BuildingBlock, ...]:
    """Return every block with 1 to 4 ticks per hop in a run, and as many in a gap.

    A run is the F or the B of all stages of one chunk index, in stage order: the loop placement
    with one stage per rank has two runs, the V has four.
    """
    period = 3 * placement.stages // placement.pp
    ranks = [*placement.rank_of, *reversed(placement.rank_of)]  # F, then B, of every stage
    found_blocks = []
    for ticks in _extend([], ranks, placement.pp, period):
        rank_ticks: list[list[int]] = [[] for _ in range(placement.pp)]
        for rank, tick in zip(ranks, ticks):
            rank_ticks[rank].append(tick)
        phases = tuple(map(_split_phases, rank_ticks))
        found_blocks.append(
            BuildingBlock(phases, period, max(_count_peak_live(*phase, period) for phase in phases))
        )
    return tuple(found_blocks)


def _extend(ticks: list[int], ranks: list[int], pp: int, period: int) -> Iterator[list[int]]:
    """Yield all completions of `ticks` without a collision, run by run."""
    if len(ticks) == len(ranks):
        yield ticks
        return
    occupied = {(rank, tick % period) for rank, tick in zip(ranks, ticks)}
    run = ranks[len(ticks) : len(ticks) + pp]
    for gap, step in product(_TICKS if ticks else [0], _TICKS):
        start = ticks[-1] + gap if ticks else 0
        more = [start + i * step for i in range(pp)]
        if occupied.isdisjoint((rank, tick % period) for rank, tick in zip(run, more)):
            yield from _extend(ticks + more, ranks, pp, period)


def _split_phases(ticks: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    half = len(ticks) // 2
    return tuple(ticks[:half]), tuple(reversed(ticks[half:]))


def _count_peak_live(forward: tuple[float, ...], backward: tuple[float, ...], period: int) -> int:
    """Return the most (microbatch, stage) pairs live at once: after an F, in the steady state."""
    ages = [[(now - f) // period - (now - b) // period for f, b in zip(forward, backward)]
            for now in (f + 1000 * period for f in forward)]  # fmt: skip
    return int(max(map(sum, ages)))
