"""Cells whose two actions XLA may overlap."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxpipe.core.schedule.action import Cell, Op, Placement


class OverlapPair(NamedTuple):
    """An F and a gradient action of different chunks in one cell, which XLA may overlap."""

    forward: int
    op: Op
    gradient: int


def list_overlap_pairs(placement: Placement, cells: Iterable[Cell]) -> tuple[OverlapPair, ...]:
    """Return the pairs of cells, sorted."""
    pairs = (overlap_pair(cell, placement) for cell in cells)
    return tuple(sorted({pair for pair in pairs if pair is not None}, key=str))


def overlap_pair(cell: Cell, placement: Placement) -> OverlapPair | None:
    """Return the pair of a cell whose two actions cannot depend on each other, else None."""
    forward, gradient = cell.forward, cell.gradient
    if not (forward and gradient):
        return None
    ahead, back = (placement.chunk(stage, m) for _, stage, m in (forward, gradient))
    return OverlapPair(ahead, gradient.op, back) if ahead != back else None
