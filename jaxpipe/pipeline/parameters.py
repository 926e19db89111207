"""A rank's parameters: what its ops read in a step, and the gradients that the step leaves."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.parallel import DP, PP, REPLICAS, TP, StageLayout, Stored
from jaxpipe.pipeline.chunk import Chunk, LayerSlot
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.kind import RunKind

Tree = Any


@dataclass(frozen=True)
class RankParameters:
    """One rank's parameters: local shapes, layers without their leading axis of ranks.

    `masters` are the parts that outlive the step, `stored` says how. `shared` and `layers` are what
    ops read, in the compute dtype: put together over dp, but for layers that every action gathers.
    """

    execution: Execution
    stored: Tree
    masters: Tree
    shared: Tree
    layers: tuple[Tree, ...]

    @classmethod
    def of(cls, params: Tree, stored: Tree, execution: Execution) -> "RankParameters":
        """Gathered from what this device stores of `params`, inside the `shard_map`."""
        stored = stored | {"layers": jax.tree.map(lambda leaf: leaf.of_rank, stored["layers"])}
        masters = params | {"layers": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
        dtype = execution.compute_dtype
        held = masters
        if dtype is not None:
            held = jax.tree.map(lambda leaf: leaf.astype(dtype), masters)
        layers = held["layers"]
        if not execution.reshard_after_forward:
            layers = _whole(stored["layers"], layers)
        return cls(execution, stored, masters, _whole(stored["shared"], held["shared"]), layers)

    def one_layer(self, slot: int) -> Tree:
        """Shapes of a slot's whole layer as ops read it."""
        if not self.execution.reshard_after_forward:
            return jax.eval_shape(lambda layer: layer, self.layers[slot])
        return jax.eval_shape(
            lambda layer: _whole(self.stored["layers"][slot], layer), self.layers[slot]
        )

    def chunks(
        self, layout: StageLayout, kinds: Sequence[RunKind], *, mirrored: bool
    ) -> tuple[Chunk, ...]:
        """The stages this rank computes; where there are more than it holds, the rest is mirrored.

        `kinds` are those of the ring slots.

        A mirrored stage of rank r is held by rank P-1-r, which sends a copy of it once a step.
        """
        table = np.array([[-1 if i is None else i for i in row] for row in layout.table], np.int32)
        chunks = self._chunks(self.layers, table, layout, kinds)
        if mirrored:
            chunks += self._chunks(_mirror(self.layers), table[::-1], layout, kinds)
        return chunks

    def _chunks(
        self,
        layers: tuple[Tree, ...],
        table: np.ndarray,
        layout: StageLayout,
        kinds: Sequence[RunKind],
    ) -> tuple[Chunk, ...]:
        """Those of some layers; `table[r, slot]` is the layer that rank r has there, or -1."""
        here, reshard = jnp.asarray(table)[lax.axis_index(PP)], self.execution.reshard_after_forward

        def layer_slot(slot: int, ring: int) -> LayerSlot:
            return LayerSlot(
                kind=kinds[ring],
                params=layers[slot],
                index=here[slot],
                active=None if (table[:, slot] >= 0).all() else here[slot] >= 0,
                ring=ring,
                reduced=partial(self._of_layer, self.stored["layers"][slot]),
                stored=self.stored["layers"][slot] if reshard else None,
                reduce_dtype=self.execution.grad_reduce_dtype,
            )

        slots = iter(range(len(layers)))
        return tuple(
            Chunk(tuple(layer_slot(next(slots), ring) for ring in layout.rings_of(chunk)))
            for chunk in range(len(layout.chunk_kinds))
        )

    def totals(self, chunks: tuple[Chunk, ...]) -> Tree:
        """Shapes and dtypes of the sums of gradients: the masters' dtype, as large as ops read."""

        def like(values: Tree, leaves: Tree) -> Tree:
            return jax.tree.map(
                lambda value, leaf: jax.ShapeDtypeStruct(value.shape, leaf.dtype), values, leaves
            )

        own = iter(itertools.cycle(map(like, self.layers, self.masters["layers"])))
        return {
            "shared": like(self.shared, self.masters["shared"]),
            "layers": tuple(tuple(next(own) for _ in chunk.slots) for chunk in chunks),
        }

    def gradients(
        self, shared: Tree, layers: tuple[tuple[Tree, ...], ...], *, reduced: bool
    ) -> Tree:
        """This device's parts of the gradients, from the sums that the last tick left.

        Layers come by chunk and slot, their sums `reduced` or not, and leave as they are stored,
        with the axis of ranks.
        """
        home = self._brought_home(layers)
        if not reduced:
            home = tuple(map(self._of_layer, self.stored["layers"], home))
        return {
            "shared": jax.tree.map(self._of_shared, self.stored["shared"], shared),
            "layers": jax.tree.map(lambda gradient: gradient[None], home),
        }

    def _of_layer(self, stored: Tree, total: Tree) -> Tree:
        """What this device keeps of a layer's sums."""
        return jax.tree.map(lambda s, g: self._reduced(s, g, self._unreduced(s)), stored, total)

    def _brought_home(self, gradients: tuple[tuple[Tree, ...], ...]) -> tuple[Tree, ...]:
        """Those of the layers that this rank holds, those of their mirrored copies added."""
        flat = tuple(tree for chunk in gradients for tree in chunk)
        own, mirrored = flat[: len(self.layers)], flat[len(self.layers) :]
        return jax.tree.map(jnp.add, own, _mirror(mirrored)) if mirrored else own

    def _of_shared(self, stored: Stored, gradient: jax.Array) -> jax.Array:
        """Of a leaf that no layer has: it is the ranks' sum, or the same on all, or parts of it."""
        if PP not in stored.leaf.parted | set(stored.leaf.summed):
            gradient = stored.part(gradient, {PP})
        summed = {PP} & set(stored.leaf.summed)
        return self._reduced(stored, gradient, summed | set(stored.replicas))

    def _unreduced(self, stored: Stored) -> set[str]:
        """The axes over which a layer's gradient is still to be summed after the last tick."""
        scattered = self.execution.reshard_after_forward and stored.dim(DP) is not None
        return set(stored.replicas).difference(stored.shards if scattered else ())

    def _reduced(self, stored: Stored, gradient: jax.Array, axes: set[str]) -> jax.Array:
        """The part of a gradient summed over these axes, and over tp where it must be."""
        if TP in stored.leaf.summed:
            gradient = lax.psum(gradient, TP)
        replicas, how = axes.intersection(REPLICAS), self.execution
        if how.zero_stage != 1 and how.grad_reduce_dtype is None:
            return stored.reduce(gradient, axes)
        gradient = stored.reduce(gradient, axes - replicas)
        return stored.reduce_over_replicas(
            gradient, replicas, how.grad_reduce_dtype, scatter=how.zero_stage != 1
        )


def _whole(stored: Tree, held: Tree) -> Tree:
    """Leaves as ops read them, from what is stored of them on this device."""
    return jax.tree.map(lambda how, leaf: how.whole(leaf), stored, held)


def _mirror(tree: Tree) -> Tree:
    """What rank P-1-r has, on rank r."""
    size = lax.axis_size(PP)
    across = [(r, size - 1 - r) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, across), tree)
