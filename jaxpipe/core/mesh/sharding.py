"""How each parameter is stored on the mesh, and the collectives that follow from it.

A stage-stacked tree (parameters, gradients or moments) is sharded by the rule of
`jaxpipe.core.contract.parameter`. An array of another shape than its parameter, such as a row of
factored second moments or a preconditioner, lives with its layer too, and replicas shard its first
dim that they divide. Where several mesh axes shard one dim, those that the parameter declares have
the largest shards, in the order in which it names them, then pp, then the replicas. Where the
replicas divide no dim, one is padded with zeros at its end. The padding stays zero because its
gradients, moments and updates are zero. Layers never see this padding; only the padding of a
vocabulary that its devices do not divide reaches them, and they ignore it.
"""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.core.contract import Tree
from jaxpipe.core.contract.parameter import Names, ParamSpec, plan_sharding
from jaxpipe.core.mesh.flags import is_trained, merge
from jaxpipe.core.mesh.mesh import DP, EP, PP, REPLICA_AXES, RP, TP, ZERO_AXES

_REDUCED = (TP, PP, EP, DP, RP)  # the order in which an all-reduce names its axes
_PLAIN = ParamSpec()


@dataclass(frozen=True)
class ParamSharding:
    """How one parameter is stored on the mesh; its collectives run inside a `shard_map`.

    Attributes:
      dim_axes: for every dim the mesh axes that shard it, the axis of the largest shards first.
      param: the model's declaration. Layers consume the parameter sharded over
        `param.sharded_axes`; over the other axes it is gathered before use, and its gradient is
        reduced.
      padding: for every dim the zeros at its end, which are removed when the dim is gathered over
        all axes that shard it; (): no padding.
      lead: number of dims before those of a layer's parameter: pipeline ranks, and layers of a run.
    """

    dim_axes: tuple[Names, ...]
    param: ParamSpec = _PLAIN
    padding: tuple[int, ...] = ()
    lead: int = 1

    @cached_property
    def partition_spec(self) -> PartitionSpec:
        """The sharding as a `PartitionSpec`."""
        entries = [entry if len(entry) > 1 else next(iter(entry), None) for entry in self.dim_axes]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def trained(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.param.trained

    @property
    def without_leading_axis(self) -> "ParamSharding":
        """The sharding without the leading dim: of pipeline ranks, or then of layers of a run."""
        dims, padding = self.dim_axes[1:], self.padding[1:]
        return replace(self, dim_axes=dims, padding=padding, lead=self.lead - 1)

    @property
    def with_layer_axis(self) -> "ParamSharding":
        """The sharding of a layer's parameter `[P, ...]` stacked over a run: `[P, n, ...]`."""
        first, *rest = self.dim_axes
        padding = (self.padding[0], 0, *self.padding[1:]) if self.padding else ()
        return replace(self, dim_axes=(first, (), *rest), padding=padding, lead=self.lead + 1)

    @property
    def as_consumed(self) -> "ParamSharding":
        """The sharding of the parameter gathered for compute: over `param.sharded_axes` alone."""
        axes = self.param.sharded_axes
        names = tuple(tuple(axis for axis in entry if axis in axes) for entry in self.dim_axes)
        padding = tuple(more * bool(entry) for more, entry in zip(self.padding, names))
        return replace(self, dim_axes=names, padding=padding)

    @property
    def grad_reduce_axes(self) -> Names:
        """The replica axes over which its gradient is summed: those not declared in `sharded`."""
        return tuple(axis for axis in REPLICA_AXES if axis not in self.param.sharded_axes)

    @property
    def zero_axes(self) -> Names:
        """The axes of `grad_reduce_axes` over which ZeRO may shard it."""
        return tuple(axis for axis in self.grad_reduce_axes if axis in ZERO_AXES)

    def dim_of(self, axis: str) -> int | None:
        """The dim that a mesh axis shards, or None."""
        return next((dim for dim, entry in enumerate(self.dim_axes) if axis in entry), None)

    def gather_for_compute(self, part: jax.Array) -> jax.Array:
        """All-gather over every mesh axis except those that the layer consumes sharded."""
        return self.gather(part, self._axes - self.param.sharded_axes)

    def gather(self, part: jax.Array, axes: Collection[str]) -> jax.Array:
        """All-gather the parameter over these mesh axes and remove its padding."""
        for axis, dim in reversed(self._sharded_dims(axes).items()):
            part = lax.all_gather(part, axis, axis=dim, tiled=True)
        size = self._less_padding(part.shape, axes)
        return lax.slice(part, (0,) * part.ndim, size) if size != part.shape else part

    def shard(self, full: jax.Array, axes: Collection[str]) -> jax.Array:
        """This device's shard over these mesh axes: the inverse of `gather`."""
        full = self._with_padding(full, axes)
        for axis, dim in self._sharded_dims(axes).items():
            size = full.shape[dim] // lax.axis_size(axis)
            full = lax.dynamic_slice_in_dim(full, lax.axis_index(axis) * size, size, dim)
        return full

    def reduce_scatter(self, gradient: jax.Array, axes: Collection[str]) -> jax.Array:
        """Reduce-scatter over these mesh axes; all-reduce over those that do not shard it."""
        gradient = self._with_padding(gradient, axes)
        sharded = self._sharded_dims(axes)
        for axis, dim in sharded.items():
            gradient = lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        rest = tuple(axis for axis in _REDUCED if axis in axes and axis not in sharded)
        return lax.psum(gradient, rest) if rest else gradient

    def reduce_over_replicas(
        self, gradient: jax.Array, axes: Collection[str], dtype: Any = None, *, scatter: bool = True
    ) -> jax.Array:
        """`reduce_scatter` over replica axes, with operands of `dtype` (None: the gradient's own).

        Without `scatter` the gradient is all-reduced first and then sharded.
        """
        given_dtype, axes = gradient.dtype, tuple(sorted(axes))
        if dtype is not None and math.prod(map(lax.axis_size, axes)) > 1:
            gradient = gradient.astype(dtype)
        if scatter or not axes:
            return self.reduce_scatter(gradient, axes).astype(given_dtype)
        return self.shard(lax.psum(gradient, axes).astype(given_dtype), axes)

    def pad(self, leaf: jax.Array) -> jax.Array:
        """Append the padding to a full array."""
        return self._with_padding(leaf, self._axes)

    def unpadded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a full array without the padding that `shape` includes."""
        return self._less_padding(shape, self._axes)

    def _with_padding(self, leaf: jax.Array, axes: Collection[str]) -> jax.Array:
        """Pad the dims that only these axes shard, over which `leaf` is a full array."""
        padding = self._padding_of(axes)
        xp: Any = np if isinstance(leaf, np.ndarray) else jnp  # NumPy needs no program
        return xp.pad(leaf, [(0, size) for size in padding]) if any(padding) else leaf

    def _less_padding(self, shape: tuple[int, ...], axes: Collection[str]) -> tuple[int, ...]:
        return tuple(size - more for size, more in zip(shape, self._padding_of(axes)))

    def _padding_of(self, axes: Collection[str]) -> tuple[int, ...]:
        padding = self.padding or (0,) * len(self.dim_axes)
        return tuple(
            more * set(entry).issubset(axes) for more, entry in zip(padding, self.dim_axes)
        )

    @property
    def _axes(self) -> frozenset[str]:
        return frozenset(axis for entry in self.dim_axes for axis in entry)

    def _sharded_dims(self, axes: Collection[str]) -> dict[str, int]:
        """The dim that each axis among `axes` shards, if it shards one, largest shards first."""
        entries = enumerate(self.dim_axes)
        return {axis: dim for dim, entry in entries for axis in entry if axis in axes}


@dataclass(frozen=True)
class Sharding:
    """How all parameters of a model are stored.

    Attributes:
      mesh: a mesh of `make_mesh`.
      embed_head: tree of `ParamSpec`s of the parameters in `embed_head`; None: none is consumed
        sharded, and any pipeline rank may use all of them.
      layer: function from the index of a run of layers to the `ParamSpec`s of a layer; None: no
        layer's parameter is consumed sharded.
      zero_stage: from 1 on all that outlives a step (the optimizer's master parameters and its
        moments) is sharded over replicas.
      layers: number of layers of every run; (): one each.

    Methods take stage-stacked trees, of whose leaves they need shape and dtype.

    >>> from jaxpipe.core.mesh import make_mesh
    >>> sharding = Sharding(make_mesh(pp=1, devices=jax.devices()[:1]), zero_stage=1)
    >>> tree = {"embed_head": {"norm": jnp.ones(8)}, "layers": ({"up": jnp.ones((1, 8, 4))},)}
    >>> sharding.param_shardings(tree)["layers"][0]["up"].dim_axes
    (('pp',), (), ())
    """

    mesh: Mesh
    embed_head: Tree = None
    layer: Callable[[int], Tree] | None = None
    zero_stage: int = 0
    layers: tuple[int, ...] = ()

    def pad(self, tree: Tree) -> Tree:
        """Append the padding to every leaf of a stage-stacked tree."""
        return jax.tree.map(
            lambda sharding, leaf: sharding.pad(leaf), self.param_shardings(tree), tree
        )

    def cast_frozen(self, tree: Tree, dtype: Any) -> Tree:
        """The tree with frozen parameters in the dtype in which they are stored."""
        frozen = jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
        return merge(is_trained(self.param_shardings(tree)), tree, frozen)

    def param_shardings(self, tree: Tree) -> Tree:
        """`ParamSharding` of every leaf of a stage-stacked tree, padded or not."""
        return jax.tree_util.tree_map_with_path(self._stored, tree)

    def partition_specs(self, tree: Tree) -> Tree:
        """`PartitionSpec` of every leaf of a stage-stacked tree."""
        return jax.tree.map(lambda sharding: sharding.partition_spec, self.param_shardings(tree))

    def named_shardings(self, tree: Tree) -> Tree:
        """`NamedSharding` of every leaf of a stage-stacked tree."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.partition_specs(tree))

    def _leaf(self, path: Sequence[Any], dims: int) -> ParamSpec:
        """The declaration of the parameter at a path of keys in a stage-stacked tree.

        `dims` are those of the parameter, with the stage axis of a layer's.
        """
        if path[0].key == "layers":
            node, keys = self.layer and self.layer(path[1].idx), path[2:]
        else:
            node, keys = self.embed_head, path[1:]
        if node is None:
            of_layer = path[0].key == "layers"
            return _undeclared(dims - of_layer, of_layer=of_layer)
        for key in keys:
            if isinstance(node, ParamSpec):  # an optimizer may keep several arrays of a parameter
                break
            node = node[key.key]
        return node

    def _stored(self, path: Sequence[Any], array: Any) -> ParamSharding:
        of_layer, given = path[0].key == "layers", tuple(array.shape)
        if of_layer and self.layers and self.layers[path[1].idx] > 1:
            return self._of(path, (given[0], *given[2:]), of_layer=True).with_layer_axis
        return self._of(path, given, of_layer=of_layer)

    def _of(self, path: Sequence[Any], given: tuple[int, ...], *, of_layer: bool) -> ParamSharding:
        """The sharding of an array of this shape; a layer's is without the axis of its run."""
        leaf = self._leaf(path, len(given))
        if leaf.shape is None:
            return self._planned(given, leaf, of_layer=of_layer)
        shape = (*given[:1], *leaf.shape) if of_layer else leaf.shape
        sharding = self._planned(shape, leaf, of_layer=of_layer)
        if given in (shape, tuple(map(operator.add, shape, sharding.padding))):
            return sharding
        return self._planned(given, _PLAIN, of_layer=of_layer)

    def _planned(self, shape: Sequence[int], leaf: ParamSpec, *, of_layer: bool) -> ParamSharding:
        plan = plan_sharding(
            shape, leaf, self.mesh.shape, is_layer=of_layer, zero_stage=self.zero_stage
        )
        return ParamSharding(plan.dim_axes, leaf, plan.padding)


def param_specs_of(leaves: Tree, arrays: Tree, *, of_layer: bool) -> Tree:
    """A model's `ParamSpec`s for these parameters; defaults where it declares none (None)."""
    if leaves is not None:
        return leaves
    return jax.tree.map(lambda array: _undeclared(array.ndim, of_layer=of_layer), arrays)


def _undeclared(dims: int, *, of_layer: bool) -> ParamSpec:
    """The default: not sharded by declaration; any rank may use a parameter of `embed_head`."""
    matrix = (dims - 2, dims - 1) if dims >= 2 else None
    return ParamSpec(partial_grad_axes=() if of_layer else (PP,), matrix=matrix)


def batch_spec() -> PartitionSpec:
    """`PartitionSpec` of a batch `[M, B, ...]`: sharded along B, the same on all pipeline ranks.

    >>> tuple(batch_spec())
    (None, ('rp', 'dp', 'ep'))
    """
    return PartitionSpec(None, REPLICA_AXES)
