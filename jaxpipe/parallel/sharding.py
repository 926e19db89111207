"""How each leaf is stored on the mesh, and the collectives that follow from it.

A tree in stage form (parameters, gradients or moments) is cut as `jaxpipe.partition.storage` says.
Where several mesh axes cut one axis of a leaf, tp cuts it into the largest parts, then pp, then dp.
What dp divides nowhere is stored with zeros at the end of an axis, which stay zeros: their
gradients, moments and updates are. What ops read has none.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.parallel.mesh import DP, PP, TP
from jaxpipe.partition.devices import Cut
from jaxpipe.partition.storage import cutting

Tree = Any
_NESTING = (TP, PP, DP)  # where they cut the same axis: from the largest parts to the smallest


@dataclass(frozen=True)
class Stored:
    """Where the parts of one leaf are; the methods run inside a `shard_map`.

    `summed`: whether its gradients on the devices of a tp group have to be added up. `ranks`, of a
    leaf that no layer has: what the pp ranks do with it. `add`: any of them may use all of it, and
    their gradients add up; `part`: each uses its own part; `same`: all do the same with all of it.
    `padding`: zeros at the end of the axis that dp cuts, which is then cut by nothing else.
    """

    spec: PartitionSpec
    summed: bool = False
    ranks: Literal["add", "part", "same"] = "add"
    padding: int = 0

    @property
    def of_rank(self) -> "Stored":
        """The same for a layer's leaf without its leading axis of ranks."""
        return replace(self, spec=PartitionSpec(*self.spec[1:]))

    def axis(self, name: str) -> int | None:
        """The axis that a mesh axis cuts, or None."""
        names = (entry if isinstance(entry, tuple) else (entry,) for entry in self.spec)
        return next((axis for axis, entry in enumerate(names) if name in entry), None)

    def gather(self, part: jax.Array, names: Collection[str]) -> jax.Array:
        """The leaf with the parts along these mesh axes put together, without padding."""
        for name in reversed(self._cutting(names)):
            part = lax.all_gather(part, name, axis=self.axis(name), tiled=True)
        return self.unpadded(part) if DP in names else part

    def part(self, whole: jax.Array, names: Collection[str]) -> jax.Array:
        """This device's part along these mesh axes: the inverse of `gather`."""
        whole = self.padded(whole) if DP in names else whole
        for name in self._cutting(names):
            axis = self.axis(name)
            size = whole.shape[axis] // lax.axis_size(name)
            whole = lax.dynamic_slice_in_dim(whole, lax.axis_index(name) * size, size, axis)
        return whole

    def reduce(self, gradient: jax.Array, names: Collection[str]) -> jax.Array:
        """This device's part of the sum over these mesh axes."""
        gradient = self.padded(gradient) if DP in names else gradient
        for name in self._cutting(names):
            gradient = lax.psum_scatter(
                gradient, name, scatter_dimension=self.axis(name), tiled=True
            )
        rest = tuple(name for name in _NESTING if name in names and self.axis(name) is None)
        return lax.psum(gradient, rest) if rest else gradient

    def padded(self, leaf: jax.Array) -> jax.Array:
        """A leaf, whole along dp, with its padding."""
        if not self.padding:
            return leaf
        axis = self.axis(DP)
        return jnp.pad(leaf, [(0, self.padding * (i == axis)) for i in range(leaf.ndim)])

    def unpadded(self, leaf: jax.Array) -> jax.Array:
        """A leaf, whole along dp, without its padding."""
        if not self.padding:
            return leaf
        return lax.slice(leaf, (0,) * leaf.ndim, self.true_shape(leaf.shape))

    def true_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a leaf that has this shape with its padding."""
        axis = self.axis(DP)
        return tuple(size - self.padding * (i == axis) for i, size in enumerate(shape))

    def _cutting(self, names: Collection[str]) -> list[str]:
        """Those of the names that cut the leaf, from the largest parts to the smallest."""
        return [name for name in _NESTING if name in names and self.axis(name) is not None]


@dataclass(frozen=True)
class Sharding:
    """The storage of every leaf: a mesh, a model's cuts (None: nothing is cut) and a ZeRO stage.

    `cuts` has the trees `shared` and `layer`, the latter of any one layer. From ZeRO stage 1 on,
    all that outlives a step is cut over dp: parameters, which are the optimizer's masters, and
    moments. With `vocab_parallel` the ends' parameters that tp would cut are cut over pp alike.
    """

    mesh: Mesh
    cuts: Tree = None
    zero_stage: int = 0
    vocab_parallel: bool = False

    def padded(self, tree: Tree) -> Tree:
        """A tree in stage form as it is stored, from one without padding."""
        return jax.tree.map(lambda stored, leaf: stored.padded(leaf), self.stored(tree), tree)

    def true_shapes(self, tree: Tree) -> Tree:
        """Shapes of a stored tree's leaves without their padding."""
        return jax.tree.map(
            lambda stored, leaf: stored.true_shape(leaf.shape), self.stored(tree), tree
        )

    def stored(self, tree: Tree) -> Tree:
        """`Stored` of every leaf of a tree in stage form, padded or not; they need only a shape."""
        return jax.tree_util.tree_map_with_path(self._stored, tree)

    def specs(self, tree: Tree) -> Tree:
        """`PartitionSpec` of every leaf of a tree in stage form."""
        return jax.tree.map(lambda stored: stored.spec, self.stored(tree))

    def shardings(self, tree: Tree) -> Tree:
        """`NamedSharding` of every leaf of a tree in stage form."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree))

    def _stored(self, path: tuple[Any, ...], leaf: Any) -> Stored:
        in_layer = path[0].key == "layers"
        cut = self._cut(in_layer, path[2:] if in_layer else path[1:])
        shape = leaf.shape
        if cut.shape is not None:
            shape = (*leaf.shape[:1], *cut.shape) if in_layer else cut.shape
        how = cutting(
            shape, cut, self.mesh.shape, of_layer=in_layer, zero_stage=self.zero_stage,
            vocab_parallel=self.vocab_parallel, may_pad=cut.shape is not None,
        )  # fmt: skip
        entries = [entry if len(entry) > 1 else next(iter(entry), None) for entry in how.names]
        while entries and entries[-1] is None:
            entries.pop()
        alike = "same" if cut.axis is None else "part"
        ranks = alike if self.vocab_parallel else "add"
        return Stored(PartitionSpec(*entries), cut.summed, ranks, how.padding)

    def _cut(self, in_layer: bool, path: tuple[Any, ...]) -> Cut:
        if self.cuts is None:
            return Cut()
        node = self.cuts["layer" if in_layer else "shared"]
        for key in path:
            node = node[key.key]
        return node


def batch_spec() -> PartitionSpec:
    """A batch `[M, B, ...]` is cut over dp along its examples; every rank sees all microbatches."""
    return PartitionSpec(None, DP)
