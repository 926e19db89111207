"""The layer slots of every pipeline rank, and conversion between stacked and per-layer parameters.

Stage-stacked params are `{"embed_head": tree, "layers": (run_0, run_1, ...)}`. A run is one layer
slot, or several in a row that a loop executes. A layer slot holds one layer of every pipeline rank,
all of one kind: each leaf has a leading dim of length P that is sharded over pp, with zeros where a
rank has no layer (the executor skips these). In a run of n > 1 slots a dim of length n follows. The
slots of a rank's first chunk come first. The slots of a chunk are a short sequence of kinds that
contains the kinds of each of its stages in order; with a single kind there are as many slots
as its longest stage has layers. The parameters in `embed_head` (embedding, final norm, head) are
sharded over pp too, so that their optimizer state is stored once.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.core.contract import Tree
from jaxpipe.core.schedule import Placement


@dataclass(frozen=True)
class StageLayout:
    """Assignment of layers to stages, and of stages to layer slots on pipeline ranks.

    Attributes:
      layers_per_stage: number of layers of each stage, in order.
      placement: pipeline rank and chunk of each stage; None: stage r on pipeline rank r. With a
        bidirectional placement only each rank's own stages are stored.
      kinds: the kind of every layer; None: all layers are of one kind.
      unroll: layer slots of one kind in a row are a run if there are more than this many; slots
        that are empty on some pipeline rank are apart from the others. None: every layer slot is a
        run of its own.
      remat_layers: the ring slots that the first so many layer slots of any chunk use store other
        residuals (`Execution.remat_layers`), so these have runs and ring groups of their own.
    """

    layers_per_stage: tuple[int, ...]
    placement: Placement | None = None
    kinds: tuple[str, ...] | None = None
    unroll: int | None = None
    remat_layers: int = 0

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return self._placement.pp

    @property
    def mirrored(self) -> bool:
        """Whether pipeline ranks also compute copies of others' stages (bidirectional)."""
        return self._placement.mirrored_from is not None

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(self.layers_per_stage)

    def first_layer(self, stage: int) -> int:
        """Index in the model of a stage's first layer."""
        return sum(self.layers_per_stage[:stage])

    @cached_property
    def chunk_kinds(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of the layer slots of each chunk.

        >>> StageLayout((2, 2), kinds=("dense", "sparse", "sparse", "sparse")).chunk_kinds
        (('dense', 'sparse', 'sparse'),)
        """
        chunks: list[list[tuple[str, ...]]] = [[] for _ in range(self._placement.stored_chunks)]
        for stage in range(len(self.layers_per_stage)):
            chunks[self._placement.chunk(stage)].append(self._kinds_of(stage))
        return tuple(map(_slots_of, chunks))

    @cached_property
    def slot_kinds(self) -> tuple[str, ...]:
        """The kind of every layer slot of a pipeline rank."""
        return tuple(kind for kinds in self.chunk_kinds for kind in kinds)

    @cached_property
    def chunk_runs(self) -> tuple[tuple[range, ...], ...]:
        """The layer slots of every run, by chunk.

        A slot that is empty on some pipeline rank needs a conditional, and XLA copies parameters
        and gradient sums of a loop's layer into one and back.

        >>> StageLayout((4, 4), kinds=tuple("abbb" "bbbb"), unroll=2).chunk_runs
        ((range(0, 1), range(1, 4), range(4, 5)),)
        """
        first, chunks = 0, []
        is_full = [None not in layers for layers in zip(*self.layer_table)]
        for chunk in range(len(self.chunk_kinds)):
            runs: list[range] = []
            forms = map(self._form_of, self.ring_slots_of(chunk))
            for _, group in groupby(zip(forms, is_full[first:])):
                end = first + len(tuple(group))
                loops = self.unroll is not None and end - first > max(self.unroll, 1)
                step = end - first if loops else 1
                runs += [range(slot, slot + step) for slot in range(first, end, step)]
                first = end
            chunks.append(tuple(runs))
        return tuple(chunks)

    @property
    def runs(self) -> tuple[range, ...]:
        """The layer slots of every run of a pipeline rank."""
        return tuple(run for runs in self.chunk_runs for run in runs)

    @cached_property
    def layer_table(self) -> tuple[tuple[int | None, ...], ...]:
        """Index of the layer in each slot, by pipeline rank; None where a slot is empty.

        >>> StageLayout((1, 2, 1, 1), Placement.v_shape(2)).layer_table
        ((0, None, 4), (1, 2, 3))
        """
        rows: list[list[int | None]] = [[None] * len(self.slot_kinds) for _ in range(self.pp)]
        for stage in range(len(self.layers_per_stage)):
            row, chunk = rows[self._placement.rank_of[stage]], self._placement.chunk(stage)
            first = sum(map(len, self.chunk_kinds[:chunk]))
            slots = _embed(self._kinds_of(stage), self.chunk_kinds[chunk])
            for layer, slot in enumerate(slots, self.first_layer(stage)):
                row[first + slot] = layer
        return tuple(map(tuple, rows))

    @cached_property
    def ring_slot_kinds(self) -> tuple[str, ...]:
        """The kind of every ring slot: for each kind, the most layer slots that any chunk has.

        A ring slot is the set of ring buffers that a layer slot uses; chunks share ring slots.
        """
        most = reduce(operator.or_, map(Counter, self.chunk_kinds))
        return tuple(most.elements())

    def ring_slots_of(self, chunk: int) -> tuple[int, ...]:
        """The ring slot that each layer slot of a chunk uses.

        >>> StageLayout((1, 2), Placement.v_shape(1), ("b", "a", "b")).ring_slots_of(1)
        (1, 0)
        """
        return self._rings_of_chunks[chunk]

    @cached_property
    def _rings_of_chunks(self) -> tuple[tuple[int, ...], ...]:
        rings_of: dict[str, list[int]] = {}
        for ring, kind in enumerate(self.ring_slot_kinds):
            rings_of.setdefault(kind, []).append(ring)
        chunks = []
        for kinds in self.chunk_kinds:
            free = {kind: iter(rings) for kind, rings in rings_of.items()}
            chunks.append(tuple(next(free[kind]) for kind in kinds))
        return tuple(chunks)

    @cached_property
    def ring_groups(self) -> tuple[range, ...]:
        """The ring slots that share stacked ring buffers: all of a kind if a loop runs over some.

        >>> StageLayout((5, 4), kinds=("a", *"bbbb", *"bbbb"), unroll=2).ring_groups
        (range(0, 1), range(1, 5))
        >>> StageLayout((5,), unroll=1, remat_layers=2).ring_groups
        (range(0, 2), range(2, 5))
        """
        looped = {self._form_of(self._ring_slots[run.start]) for run in self.runs if len(run) > 1}
        groups: list[range] = []
        for ring in range(len(self.ring_slot_kinds)):
            form = self._form_of(ring)
            if form in looped and groups and self._form_of(groups[-1].start) == form:
                groups[-1] = range(groups[-1].start, ring + 1)
            else:
                groups.append(range(ring, ring + 1))
        return tuple(groups)

    @cached_property
    def _ring_slots(self) -> tuple[int, ...]:
        """The ring slot of every layer slot of a pipeline rank."""
        chunks = range(len(self.chunk_kinds))
        return tuple(ring for chunk in chunks for ring in self.ring_slots_of(chunk))

    @cached_property
    def _remat_ring_slots(self) -> frozenset[int]:
        return self.first_ring_slots(self.remat_layers)

    def _form_of(self, ring: int) -> tuple[str, bool]:
        """The kind of a ring slot, and whether it is one of `remat_layers`."""
        return self.ring_slot_kinds[ring], ring in self._remat_ring_slots

    def ring_place_of(self, slot: int) -> tuple[int, int]:
        """The ring group that a layer slot uses, and the index of its ring slot there.

        >>> layout = StageLayout((5, 4), kinds=("a", *"bbbb", *"bbbb"), unroll=2)
        >>> layout.ring_place_of(0), layout.ring_place_of(2)
        ((0, 0), (1, 1))
        """
        ring = self._ring_slots[slot]
        group = next(group for group, rings in enumerate(self.ring_groups) if ring in rings)
        return group, ring - self.ring_groups[group].start

    def first_ring_slots(self, layers: int) -> frozenset[int]:
        """The ring slots that the first `layers` layer slots of any chunk use.

        >>> sorted(StageLayout((3, 3)).first_ring_slots(2))
        [0, 1]
        """
        chunks = range(len(self.chunk_kinds))
        return frozenset(ring for chunk in chunks for ring in self.ring_slots_of(chunk)[:layers])

    def _kinds_of(self, stage: int) -> tuple[str, ...]:
        """The kinds of a stage's layers."""
        first, count = self.first_layer(stage), self.layers_per_stage[stage]
        return ("layer",) * count if self.kinds is None else self.kinds[first : first + count]

    def slot_of(self, layer: int) -> tuple[int, int]:
        """`(pp_rank, slot)` of a layer.

        >>> [StageLayout((2, 1)).slot_of(layer) for layer in range(3)]
        [(0, 0), (0, 1), (1, 0)]
        """
        return next((r, row.index(layer)) for r, row in enumerate(self.layer_table) if layer in row)

    def place_of(self, layer: int) -> tuple[int, tuple[int, ...]]:
        """The run of a layer and its index in the arrays of this run.

        >>> StageLayout((2, 2)).place_of(3), StageLayout((2, 2), unroll=1).place_of(3)
        ((1, (1,)), (0, (1, 1)))
        """
        rank, slot = self.slot_of(layer)
        number = next(number for number, run in enumerate(self.runs) if slot in run)
        run = self.runs[number]
        return number, (rank, slot - run.start) if len(run) > 1 else (rank,)

    def layers_of(self, run: int) -> dict[tuple[int, ...], int]:
        """The layers of a run by their index in its arrays.

        >>> StageLayout((2, 2), unroll=1).layers_of(0)
        {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}
        """
        places = map(self.place_of, range(self.layers))
        return {index: layer for layer, (number, index) in enumerate(places) if number == run}

    def stack(self, layers: Sequence[Tree]) -> tuple[Tree, ...]:
        """Stack per-layer trees into runs.

        Args:
          layers: the trees of all layers in order; those of one kind have the same shapes.

        Returns:
          A tree per run, with leaves `[P, ...]`, or `[P, n, ...]` for a run of n > 1 layer slots,
          that are zero where a rank's slot is empty. They are NumPy arrays if all of `layers` are,
          and then XLA compiles nothing.

        >>> slots = StageLayout((1, 2)).stack([{"w": jnp.full(3, i)} for i in range(3)])
        >>> [slot["w"].tolist() for slot in slots]
        [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [2, 2, 2]]]
        """
        on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(layers))
        xp: Any = np if on_host else jnp
        slots = []
        for ranks in zip(*self.layer_table):
            zeros = jax.tree.map(xp.zeros_like, layers[max(i for i in ranks if i is not None)])
            of_ranks = [zeros if i is None else layers[i] for i in ranks]
            slots.append(jax.tree.map(lambda *leaves: xp.stack(leaves), *of_ranks))
        return tuple(
            slots[run.start]
            if len(run) == 1
            else jax.tree.map(lambda *leaves: xp.stack(leaves, 1), *slots[run.start : run.stop])
            for run in self.runs
        )

    def unstack(self, runs: Sequence[Tree]) -> list[Tree]:
        """The layers' trees in order: the inverse of `stack`.

        >>> layout = StageLayout((1, 2))
        >>> [layer.tolist() for layer in layout.unstack(layout.stack([jnp.ones(2)] * 3))]
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        """
        places = map(self.place_of, range(self.layers))
        return [jax.tree.map(lambda leaf: leaf[index], runs[run]) for run, index in places]  # noqa: B023

    @property
    def _placement(self) -> Placement:
        return self.placement or Placement.loop(len(self.layers_per_stage))


def _slots_of(stages: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """A short sequence of kinds that contains the kinds of every stage in their order.

    Merging two stages at a time may leave a slot that none of them uses; it is dropped.

    >>> _slots_of([("a", "a"), ("b",), ("b", "a", "a")])
    ('b', 'a', 'a')
    """
    slots = reduce(_common, dict.fromkeys(stages))
    used = {slot for kinds in stages for slot in _embed(kinds, slots)}
    return tuple(kind for slot, kind in enumerate(slots) if slot in used)


def _embed(kinds: Sequence[str], slots: Sequence[str]) -> list[int]:
    """The slot of each layer of a stage: the first of its kind after the layer before it."""
    found = [-1]
    for kind in kinds:
        found.append(slots.index(kind, found[-1] + 1))
    return found[1:]


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[str, ...]:
    """A shortest sequence of kinds that contains both sequences in their order.

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


def is_stage_stacked(node: Any) -> bool:
    """Whether a tree is stage-stacked: `{"embed_head": tree, "layers": runs}`."""
    return isinstance(node, dict) and node.keys() == {"embed_head", "layers"}


def stage_stacked_trees(tree: Any) -> list[Any]:
    """The stage-stacked trees in a tree, such as the moments of an optimizer state."""
    return list(filter(is_stage_stacked, jax.tree.leaves(tree, is_leaf=is_stage_stacked)))


def map_stage_stacked(
    change: Callable[[Any], Any], tree: Any, rest: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Apply `change` to the stage-stacked trees in a tree, and `rest` to all other leaves."""
    return jax.tree.map(
        lambda node: change(node) if is_stage_stacked(node) else rest(node),
        tree, is_leaf=is_stage_stacked,
    )  # fmt: skip
