"""Where parameters live: stage layout on the mesh, and the layer-keyed form that has no mesh.

The stage form is `{"shared": tree, "layers": (slot_0, slot_1, ...)}`. Slot j holds the j-th layer
of every rank, each leaf with a leading axis of length P sharded over pp. Ranks with fewer layers
have zeros in their last slots, which the executor skips. Shared leaves (embedding, final norm,
head) are cut over pp too, so that optimizer state is held once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpipe.parallel.mesh import DP, PP

Tree = Any


@dataclass(frozen=True)
class StageLayout:
    """Layers per rank, in order of rank: the layers of rank r follow those of rank r - 1."""

    counts: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Layer slots of every rank: the most that any rank needs."""
        return max(self.counts)

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether every slot of every rank holds a layer."""
        return min(self.counts) == self.slots

    def first_layer(self, rank: int) -> int:
        """Global index of the first layer of a rank."""
        return sum(self.counts[:rank])

    def place_of(self, layer: int) -> tuple[int, int]:
        """`(rank, slot)` of a layer.

        >>> [StageLayout((2, 1)).place_of(layer) for layer in range(3)]
        [(0, 0), (0, 1), (1, 0)]
        """
        rank = next(r for r in range(len(self.counts)) if layer < self.first_layer(r + 1))
        return rank, layer - self.first_layer(rank)

    def stack(self, layers: Sequence[Tree]) -> tuple[Tree, ...]:
        """Slots of the layers' trees: leaves `[P, ...]`, zeros where a rank has no such layer."""
        zeros = jax.tree.map(jnp.zeros_like, layers[0])
        slots: list[list[Tree]] = [[zeros] * len(self.counts) for _ in range(self.slots)]
        for index, layer in enumerate(layers):
            rank, slot = self.place_of(index)
            slots[slot][rank] = layer
        return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *ranks) for ranks in slots)

    def unstack(self, slots: Sequence[Tree]) -> list[Tree]:
        """The layers' trees in order: the inverse of `stack`."""
        places = map(self.place_of, range(self.layers))
        return [jax.tree.map(lambda leaf: leaf[rank], slots[slot]) for rank, slot in places]  # noqa: B023


def shared_axis(shape: Sequence[int], pp: int) -> int | None:
    """The axis along which a shared leaf is cut over pp: the first that pp divides, or None."""
    return next((axis for axis, size in enumerate(shape) if size % pp == 0), None)


def state_specs(params: Tree, pp: int) -> Tree:
    """PartitionSpecs of a tree in stage form (parameters, gradients or moments)."""

    def shared(leaf: Any) -> PartitionSpec:
        axis = shared_axis(leaf.shape, pp)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, PP)

    return {
        "shared": jax.tree.map(shared, params["shared"]),
        "layers": jax.tree.map(lambda _: PartitionSpec(PP), params["layers"]),
    }


def batch_spec() -> PartitionSpec:
    """A batch `[M, B, ...]` is cut over dp along its examples; every rank sees all microbatches."""
    return PartitionSpec(None, DP)
