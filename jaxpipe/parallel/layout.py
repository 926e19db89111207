"""Where parameters live: stage layout on the mesh, and the layer-keyed form that has no mesh.

The stage form is `{"shared": tree, "layers": (slot_0, slot_1, ...)}`. Every stage of a rank has as
many layer slots as the longest stage has layers; the slots of a rank's first stage come first.
Slot j holds the j-th layer of every rank, each leaf with a leading axis of length P sharded over
pp, zeros where a rank has no layer there, which the executor skips. Shared leaves (embedding, final
norm, head) are cut over pp too, so that optimizer state is held once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.schedule import Placement

Tree = Any


@dataclass(frozen=True)
class StageLayout:
    """Layers per stage, in order, and where the stages live (None: stage r on rank r).

    Of a bidirectional placement it is the ranks' own stages that are stored.
    """

    counts: tuple[int, ...]
    placement: Placement | None = None

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return self._placement.pp

    @property
    def slots(self) -> int:
        """Layer slots of every stage: the most layers that any stage has."""
        return max(self.counts)

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(self.counts)

    def first_layer(self, stage: int) -> int:
        """Global index of the first layer of a stage."""
        return sum(self.counts[:stage])

    @cached_property
    def table(self) -> tuple[tuple[int | None, ...], ...]:
        """The global index of the layer in each slot of each rank, None where there is none.

        >>> StageLayout((1, 2, 1, 1), Placement.v_shape(2)).table
        ((0, None, 4, None), (1, 2, 3, None))
        """
        chunks = self._placement.own_chunks
        rows: list[list[int | None]] = [[None] * (chunks * self.slots) for _ in range(self.pp)]
        for stage, count in enumerate(self.counts):
            row, first = rows[self._placement.rank_of[stage]], self.first_layer(stage)
            start = self._placement.chunk(stage) * self.slots
            row[start : start + count] = range(first, first + count)
        return tuple(map(tuple, rows))

    def place_of(self, layer: int) -> tuple[int, int]:
        """`(rank, slot)` of a layer.

        >>> [StageLayout((2, 1)).place_of(layer) for layer in range(3)]
        [(0, 0), (0, 1), (1, 0)]
        """
        return next((r, row.index(layer)) for r, row in enumerate(self.table) if layer in row)

    def stack(self, layers: Sequence[Tree]) -> tuple[Tree, ...]:
        """Slots of the layers' trees: leaves `[P, ...]`, zeros where a rank has no such layer."""
        zeros = jax.tree.map(jnp.zeros_like, layers[0])
        slots = [[zeros if i is None else layers[i] for i in ranks] for ranks in zip(*self.table)]
        return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *ranks) for ranks in slots)

    def unstack(self, slots: Sequence[Tree]) -> list[Tree]:
        """The layers' trees in order: the inverse of `stack`."""
        places = map(self.place_of, range(self.layers))
        return [jax.tree.map(lambda leaf: leaf[rank], slots[slot]) for rank, slot in places]  # noqa: B023

    @property
    def _placement(self) -> Placement:
        return self.placement or Placement.loop(len(self.counts))


def is_stage_form(node: Any) -> bool:
    """Whether this is a tree in stage form."""
    return isinstance(node, dict) and node.keys() == {"shared", "layers"}
