"""Building blocks: when each op of a microbatch happens, such that repeating it never collides.

With unit ops a rank of C stages does 3C ops a microbatch, so a block repeats every 3C ticks. F of
stage s + 1 follows F of stage s by `d` ticks along a run of stages in one direction, likewise B; a
gap separates the runs. Two ops of a rank must differ modulo the period, which leaves the ticks in
between to W. A microbatch is held from F to B (W follows in the next free tick), so the lifespans
give the memory (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from jaxpipe.schedule.action import Placement


@dataclass(frozen=True)
class Block:
    """`phases[rank]`: the ticks of F and of B of microbatch 0, for each of the rank's stages."""

    phases: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    period: int
    held: int  # most (microbatch, stage) pairs from F to B on any rank


@lru_cache(maxsize=8)  # many searches are for few placements
def blocks(placement: Placement, steps: int = 4, gaps: int = 4) -> tuple[Block, ...]:
    """Every block with `1..steps` ticks between neighbours in each run and `1..gaps` at its turns.

    A run is all of F or B through one chunk, in the order of the stages: the loop placement with
    one stage a rank has two, the V four.
    """
    period = 3 * placement.stages // placement.pp
    ranks = [*placement.rank_of, *reversed(placement.rank_of)]  # of the 2 S ops of a microbatch
    every = []
    for ticks in _extended([], ranks, placement.pp, period, steps, gaps):
        own: list[list[int]] = [[] for _ in range(placement.pp)]
        for rank, tick in zip(ranks, ticks):
            own[rank].append(tick)
        phases = tuple(map(_phases, own))
        every.append(Block(phases, period, max(_held(*phase, period) for phase in phases)))
    return tuple(every)


def _extended(
    ticks: list[int], ranks: list[int], pp: int, period: int, steps: int, gaps: int
) -> Iterator[list[int]]:
    """All ways to go on from `ticks`, run by run, without a collision."""
    if len(ticks) == len(ranks):
        yield ticks
        return
    taken = {(rank, tick % period) for rank, tick in zip(ranks, ticks)}
    run = ranks[len(ticks) : len(ticks) + pp]
    for gap, step in product(range(1, gaps + 1) if ticks else [0], range(1, steps + 1)):
        start = ticks[-1] + gap if ticks else 0
        more = [start + i * step for i in range(pp)]
        if taken.isdisjoint((rank, tick % period) for rank, tick in zip(run, more)):
            yield from _extended(ticks + more, ranks, pp, period, steps, gaps)


def _phases(own: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    half = len(own) // 2
    return tuple(own[:half]), tuple(reversed(own[half:]))


def _held(forward: tuple[float, ...], backward: tuple[float, ...], period: int) -> int:
    """Most pairs at once: just after one of the F of a period, long after the start."""
    ages = [[(now - f) // period - (now - b) // period for f, b in zip(forward, backward)]
            for now in (f + 1000 * period for f in forward)]  # fmt: skip
    return int(max(map(sum, ages)))
