"""Where parameters live: stage layout on the mesh, and the layer-keyed form that has no mesh.

The stage form is `{"shared": tree, "layers": (slot_0, slot_1, ...)}`. A layer slot holds one layer
of every rank, all of one kind, each leaf with a leading dim of length P sharded over pp, zeros
where a rank has no layer there, which the executor skips. The slots of a rank's first chunk come
first. A chunk has the fewest slots in whose order of kinds that of each of its stages is contained:
with one kind of layer as many as its longest stage has layers. Shared leaves (embedding, final
norm, head) are cut over pp too, so that optimizer state is held once.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.schedule import Placement

Tree = Any


@dataclass(frozen=True)
class StageLayout:
    """Where every layer is.

    Attributes:
      counts: layers per stage, in order.
      placement: where the stages live; None: stage r on rank r. Of a bidirectional placement it is
        the ranks' own stages that are stored.
      kinds: the kind of every layer; None: all are of one.
    """

    counts: tuple[int, ...]
    placement: Placement | None = None
    kinds: tuple[str, ...] | None = None

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return self._placement.pp

    @property
    def mirrored(self) -> bool:
        """Whether ranks have a second copy of others' stages, for microbatches from the far end."""
        return self._placement.mirrored_from is not None

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(self.counts)

    def first_layer(self, stage: int) -> int:
        """Global index of the first layer of a stage."""
        return sum(self.counts[:stage])

    @cached_property
    def chunk_kinds(self) -> tuple[tuple[str, ...], ...]:
        """The kind of every layer slot, by chunk.

        >>> StageLayout((2, 2), kinds=("dense", "sparse", "sparse", "sparse")).chunk_kinds
        (('dense', 'sparse', 'sparse'),)
        """
        chunks: list[list[tuple[str, ...]]] = [[] for _ in range(self._placement.own_chunks)]
        for stage in range(len(self.counts)):
            chunks[self._placement.chunk(stage)].append(self._kinds_of(stage))
        return tuple(reduce(_common, stages) for stages in chunks)

    @property
    def slot_kinds(self) -> tuple[str, ...]:
        """The kind of every layer slot of a rank."""
        return tuple(kind for kinds in self.chunk_kinds for kind in kinds)

    @cached_property
    def table(self) -> tuple[tuple[int | None, ...], ...]:
        """The global index of the layer in each slot of each rank, None where there is none.

        >>> StageLayout((1, 2, 1, 1), Placement.v_shape(2)).table
        ((0, None, 4), (1, 2, 3))
        """
        rows: list[list[int | None]] = [[None] * len(self.slot_kinds) for _ in range(self.pp)]
        for stage in range(len(self.counts)):
            row, chunk = rows[self._placement.rank_of[stage]], self._placement.chunk(stage)
            slot = sum(map(len, self.chunk_kinds[:chunk]))
            for layer, kind in enumerate(self._kinds_of(stage), self.first_layer(stage)):
                slot = self.slot_kinds.index(kind, slot)
                row[slot] = layer
                slot += 1
        return tuple(map(tuple, rows))

    @property
    def ring_kinds(self) -> tuple[str, ...]:
        """The kind of every ring slot: of each kind as many as any chunk has layer slots."""
        most = reduce(operator.or_, map(Counter, self.chunk_kinds))
        return tuple(most.elements())

    def rings_of(self, chunk: int) -> tuple[int, ...]:
        """Which of the ring slots each layer slot of a chunk uses; chunks share them.

        >>> StageLayout((1, 2), Placement.v_shape(1), ("b", "a", "b")).rings_of(1)
        (1, 0)
        """
        free = list(enumerate(self.ring_kinds))
        rings = []
        for kind in self.chunk_kinds[chunk]:
            place = next(i for i, (_, of) in enumerate(free) if of == kind)
            rings.append(free.pop(place)[0])
        return tuple(rings)

    def first_rings(self, layers: int) -> frozenset[int]:
        """The ring slots of the first so many layer slots of every chunk.

        >>> sorted(StageLayout((3, 3)).first_rings(2))
        [0, 1]
        """
        chunks = range(len(self.chunk_kinds))
        return frozenset(ring for chunk in chunks for ring in self.rings_of(chunk)[:layers])

    def _kinds_of(self, stage: int) -> tuple[str, ...]:
        """The kinds of a stage's layers."""
        first, count = self.first_layer(stage), self.counts[stage]
        return ("layer",) * count if self.kinds is None else self.kinds[first : first + count]

    def place_of(self, layer: int) -> tuple[int, int]:
        """`(rank, slot)` of a layer.

        >>> [StageLayout((2, 1)).place_of(layer) for layer in range(3)]
        [(0, 0), (0, 1), (1, 0)]
        """
        return next((r, row.index(layer)) for r, row in enumerate(self.table) if layer in row)

    def stack(self, layers: Sequence[Tree]) -> tuple[Tree, ...]:
        """Slots of the layers' trees: leaves `[P, ...]`, zeros where a rank has no such layer.

        `layers` are the trees of all layers in order, of a kind all of the same shapes.

        >>> slots = StageLayout((1, 2)).stack([{"w": jnp.full(3, i)} for i in range(3)])
        >>> [slot["w"].tolist() for slot in slots]
        [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [2, 2, 2]]]
        """
        slots = []
        for ranks in zip(*self.table):
            zeros = jax.tree.map(jnp.zeros_like, layers[max(i for i in ranks if i is not None)])
            of_ranks = [zeros if i is None else layers[i] for i in ranks]
            slots.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_ranks))
        return tuple(slots)

    def unstack(self, slots: Sequence[Tree]) -> list[Tree]:
        """The layers' trees in order: the inverse of `stack`.

        >>> layout = StageLayout((1, 2))
        >>> [layer.tolist() for layer in layout.unstack(layout.stack([jnp.ones(2)] * 3))]
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        """
        places = map(self.place_of, range(self.layers))
        return [jax.tree.map(lambda leaf: leaf[rank], slots[slot]) for rank, slot in places]  # noqa: B023

    @property
    def _placement(self) -> Placement:
        return self.placement or Placement.loop(len(self.counts))


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[str, ...]:
    """A shortest sequence of kinds that contains both in their order.

    >>> _common(("a", "b", "a"), ("b", "a", "b"))
    ('a', 'b', 'a', 'b')
    """
    best: dict[tuple[int, int], tuple[str, ...]] = {}
    for i in range(len(left), -1, -1):
        for j in range(len(right), -1, -1):
            if i == len(left) or j == len(right):
                best[i, j] = (*left[i:], *right[j:])
            elif left[i] == right[j]:
                best[i, j] = (left[i], *best[i + 1, j + 1])
            else:
                a, b = (left[i], *best[i + 1, j]), (right[j], *best[i, j + 1])
                best[i, j] = a if len(a) <= len(b) else b
    return best[0, 0]


def is_stage_form(node: Any) -> bool:
    """Whether this is a tree in stage form: `{"shared": tree, "layers": slots}`."""
    return isinstance(node, dict) and node.keys() == {"shared", "layers"}
