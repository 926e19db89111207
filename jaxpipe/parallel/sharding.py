"""How each leaf is stored on the mesh, and the collectives that follow from it.

A tree in stage form (parameters, gradients or moments) is cut as `jaxpipe.partition.leaf` says.
Where several mesh axes cut one dim of a leaf, tp cuts it into the largest parts, then pp, then the
replicas. What the replicas divide nowhere is stored with zeros at the end of a dim, which stay
zeros: their gradients, moments and updates are. What ops read has none of these; of a vocabulary
that the devices which share it do not divide they read the padding too, and make nothing of it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.parallel.mesh import DP, EP, PP, REPLICAS, RP, SHARDS, TP
from jaxpipe.partition.leaf import Leaf, Names, cutting

Tree = Any
_NESTING = (TP, PP, EP, DP, RP)  # the order in which axes cut, the largest parts first; rp never
_PLAIN = Leaf()


@dataclass(frozen=True)
class Stored:
    """Where the parts of one leaf are; the methods run inside a `shard_map`.

    `names` has for every dim the mesh axes that cut it, largest parts first. `leaf` is what the
    model says: ops read the parts along `leaf.parted`, so that along the other axes that cut it
    somebody gathers them, and sums or cuts the gradient. `padding`: for every dim the zeros at its
    end, which go where a dim is put together along all axes that cut it; (): there are none.
    """

    names: tuple[Names, ...]
    leaf: Leaf = _PLAIN
    padding: tuple[int, ...] = ()

    @cached_property
    def spec(self) -> PartitionSpec:
        """The same as jax has it."""
        entries = [entry if len(entry) > 1 else next(iter(entry), None) for entry in self.names]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def of_rank(self) -> "Stored":
        """The same for a layer's leaf without its leading dim of ranks."""
        return replace(self, names=self.names[1:], padding=self.padding[1:])

    @property
    def replicas(self) -> Names:
        """The axes of replicas over which its gradient is summed: those that have all of it."""
        return tuple(axis for axis in REPLICAS if axis not in self.leaf.parted)

    @property
    def shards(self) -> Names:
        """Those of `replicas` that may hold parts."""
        return tuple(axis for axis in self.replicas if axis in SHARDS)

    def dim(self, axis: str) -> int | None:
        """The dim that a mesh axis cuts, or None."""
        return next((dim for dim, entry in enumerate(self.names) if axis in entry), None)

    def whole(self, part: jax.Array) -> jax.Array:
        """The leaf as ops read it: put together along all axes but those whose parts they read."""
        return self.gather(part, self._axes - self.leaf.parted)

    def gather(self, part: jax.Array, axes: Collection[str]) -> jax.Array:
        """The leaf with the parts along these mesh axes put together, without padding."""
        for axis in reversed(self._cutting(axes)):
            part = lax.all_gather(part, axis, axis=self.dim(axis), tiled=True)
        size = self._less_padding(part.shape, axes)
        return lax.slice(part, (0,) * part.ndim, size) if size != part.shape else part

    def part(self, whole: jax.Array, axes: Collection[str]) -> jax.Array:
        """This device's part along these mesh axes: the inverse of `gather`."""
        whole = self._with_padding(whole, axes)
        for axis in self._cutting(axes):
            dim = self.dim(axis)
            size = whole.shape[dim] // lax.axis_size(axis)
            whole = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, dim)
        return whole

    def reduce(self, gradient: jax.Array, axes: Collection[str]) -> jax.Array:
        """This device's part of the sum over these mesh axes."""
        gradient = self._with_padding(gradient, axes)
        cutting = self._cutting(axes)
        for axis in cutting:
            gradient = lax.psum_scatter(
                gradient, axis, scatter_dimension=self.dim(axis), tiled=True
            )
        rest = tuple(axis for axis in _NESTING if axis in axes and axis not in cutting)
        return lax.psum(gradient, rest) if rest else gradient

    def reduce_over_replicas(
        self, gradient: jax.Array, axes: Collection[str], dtype: Any = None, *, scatter: bool = True
    ) -> jax.Array:
        """`reduce` over axes of replicas, with operands of this dtype (None: the gradient's own).

        Without `scatter` every device first has the whole sum, and then keeps its part.
        """
        own, axes = gradient.dtype, tuple(sorted(axes))
        if dtype is not None and math.prod(map(lax.axis_size, axes)) > 1:
            gradient = gradient.astype(dtype)
        if scatter or not axes:
            return self.reduce(gradient, axes).astype(own)
        return self.part(lax.psum(gradient, axes).astype(own), axes)

    @property
    def on_each_rank(self) -> "Stored":
        """The same where every rank of the pipeline has for itself what is else cut over them."""
        names = tuple(tuple(axis for axis in entry if axis != PP) for entry in self.names)
        summed = tuple(axis for axis in self.leaf.summed if axis != PP)
        return replace(self, names=names, leaf=replace(self.leaf, summed=summed))

    def to_each_rank(self, part: jax.Array) -> jax.Array:
        """What `on_each_rank` has, from what is stored."""
        return self.on_each_rank.part(self.gather(part, {PP, *REPLICAS}), REPLICAS)

    def of_owner(self, held: jax.Array, owns: jax.Array) -> jax.Array:
        """What is stored, from what the one rank has that `owns` it: the inverse."""
        whole = self.on_each_rank.gather(jnp.where(owns, held, 0), REPLICAS)
        return self.part(self.reduce(whole, {PP}), REPLICAS)

    def padded(self, leaf: jax.Array) -> jax.Array:
        """A whole leaf with its padding."""
        return self._with_padding(leaf, self._axes)

    def true_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a whole leaf that has this shape with its padding."""
        return self._less_padding(shape, self._axes)

    def _with_padding(self, leaf: jax.Array, axes: Collection[str]) -> jax.Array:
        """A leaf that is whole along these axes, with the padding of dims that they alone cut."""
        padding = self._padding_of(axes)
        return jnp.pad(leaf, [(0, size) for size in padding]) if any(padding) else leaf

    def _less_padding(self, shape: tuple[int, ...], axes: Collection[str]) -> tuple[int, ...]:
        return tuple(size - more for size, more in zip(shape, self._padding_of(axes)))

    def _padding_of(self, axes: Collection[str]) -> tuple[int, ...]:
        padding = self.padding or (0,) * len(self.names)
        return tuple(more * set(entry).issubset(axes) for more, entry in zip(padding, self.names))

    @property
    def _axes(self) -> frozenset[str]:
        return frozenset(axis for entry in self.names for axis in entry)

    def _cutting(self, axes: Collection[str]) -> list[str]:
        """Those of the axes that cut the leaf, from the largest parts to the smallest."""
        return [axis for axis in _NESTING if axis in axes and self.dim(axis) is not None]


@dataclass(frozen=True)
class Sharding:
    """The storage of every leaf: a mesh, a model's leaves and a ZeRO stage.

    Attributes:
      mesh: a mesh of `make_mesh`.
      shared: the `Leaf`s of what no layer has; None: nothing is cut, any rank may use all of it.
      layer: those of the layer in a layer slot, by the slot's number; None: nothing is cut.
      zero_stage: from 1 on all that outlives a step is cut over the replicas: parameters, which are
        the optimizer's masters, and moments.

    The trees that its methods take are in stage form; of their leaves they need shape and dtype.

    >>> from jaxpipe.parallel import make_mesh
    >>> sharding = Sharding(make_mesh(pp=1, devices=jax.devices()[:1]), zero_stage=1)
    >>> tree = {"shared": {"norm": jnp.ones(8)}, "layers": ({"up": jnp.ones((1, 8, 4))},)}
    >>> sharding.stored(tree)["layers"][0]["up"].names
    (('pp',), (), ())
    """

    mesh: Mesh
    shared: Tree = None
    layer: Callable[[int], Tree] | None = None
    zero_stage: int = 0

    def padded(self, tree: Tree) -> Tree:
        """A tree in stage form as it is stored, from one without padding."""
        return jax.tree.map(lambda stored, leaf: stored.padded(leaf), self.stored(tree), tree)

    def stored(self, tree: Tree) -> Tree:
        """`Stored` of every leaf of a tree in stage form, padded or not; they need only a shape."""
        return jax.tree_util.tree_map_with_path(self._stored, tree)

    def specs(self, tree: Tree) -> Tree:
        """`PartitionSpec` of every leaf of a tree in stage form."""
        return jax.tree.map(lambda stored: stored.spec, self.stored(tree))

    def shardings(self, tree: Tree) -> Tree:
        """`NamedSharding` of every leaf of a tree in stage form."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree))

    def _leaf(self, path: Sequence[Any], array: Any) -> Leaf:
        """What the model says of the leaf at a path of keys in stage form."""
        if path[0].key == "layers":
            node, keys = self.layer and self.layer(path[1].idx), path[2:]
        else:
            node, keys = self.shared, path[1:]
        if node is None:
            of_layer = path[0].key == "layers"
            return _undeclared(array.ndim - of_layer, of_layer=of_layer)
        for key in keys:
            node = node[key.key]
        return node

    def _stored(self, path: Sequence[Any], array: Any) -> Stored:
        of_layer, leaf = path[0].key == "layers", self._leaf(path, array)
        shape = array.shape
        if leaf.shape is not None:
            shape = (*array.shape[:1], *leaf.shape) if of_layer else leaf.shape
        how = cutting(shape, leaf, self.mesh.shape, of_layer=of_layer, zero_stage=self.zero_stage)
        return Stored(how.names, leaf, how.padding)


def declared(leaves: Tree, arrays: Tree, *, of_layer: bool) -> Tree:
    """A model's `Leaf`s for these parameters, and what holds where it says nothing (None)."""
    if leaves is not None:
        return leaves
    return jax.tree.map(lambda array: _undeclared(array.ndim, of_layer=of_layer), arrays)


def _undeclared(dims: int, *, of_layer: bool) -> Leaf:
    """A leaf of which the model says nothing: any rank may use all of a shared one."""
    matrix = (dims - 2, dims - 1) if dims >= 2 else None
    return Leaf(summed=() if of_layer else (PP,), matrix=matrix)


def batch_spec() -> PartitionSpec:
    """A batch `[M, B, ...]` is cut along its examples; every rank sees all microbatches.

    >>> tuple(batch_spec())
    (None, ('rp', 'dp', 'ep'))
    """
    return PartitionSpec(None, REPLICAS)
