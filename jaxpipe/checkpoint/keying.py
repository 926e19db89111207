"""Conversion of a state between stage-stacked form and keyed form, the form on disk.

Keyed form is `{"params": tree, "optimizer": tree, "step": n}`. Every tree of parameters in it has
the keys `layers/<index>/<name>` and `embed_head/<name>`, whatever the mesh, split or
schedule. A save takes each layer from the devices of its pipeline rank, and a restore puts it on
the devices of its new pipeline rank. Padding, which depends on the number of shards, is not on
disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.checkpoint.handler import UnpaddedArray
from jaxpipe.parallel import ParamSharding, Sharding, StageLayout, is_stage_stacked
from jaxpipe.pipeline.buffers import to_device

Tree = Any
Index = tuple[int, ...]  # of a layer in the arrays of its run (`place_of`); (): of no layer
LeafFunction = Callable[
    [Any, ParamSharding, Index], Any
]  # maps (leaf, the layer's ParamSharding, its index in the leaf) to the keyed leaf


@dataclass(frozen=True)
class StateKeying:
    """Converts stage-stacked form to keyed form and back, without copies to the host.

    The methods take a state: a pytree that contains stage-stacked trees, such as parameters and
    moments, and other arrays, such as the step.

    Attributes:
      layout: which pipeline rank holds which layer.
      sharding: how parameters are stored on the mesh.

    >>> import jax.numpy as jnp
    >>> from jaxpipe.parallel import make_mesh
    >>> layout, mesh = StageLayout((2,)), make_mesh(pp=1, devices=jax.devices()[:1])
    >>> layers = layout.stack([{"up": jnp.ones(8)}] * 2)
    >>> params = {"embed_head": {"norm": jnp.ones(4)}, "layers": layers}
    >>> keyed = StateKeying(layout, Sharding(mesh)).keyed_shapes({"params": params})["params"]
    >>> sorted(keyed), keyed["layers"]["1"]["up"].shape
    (['embed_head', 'layers'], (8,))
    """

    layout: StageLayout
    sharding: Sharding

    def to_keyed(self, state: Tree) -> Tree:
        """The state in keyed form, without padding, ready to be saved."""
        return self._map(state, self._remove_padding, lambda leaf: leaf)

    def to_padded_keyed(self, state: Tree) -> Tree:
        """The state in keyed form with this layout's padding, as a restore returns it."""
        return self._map(state, self._take_row, lambda leaf: leaf)

    def keyed_shapes(self, state: Tree) -> Tree:
        """Shapes and dtypes of `to_keyed(state)`; `state` may hold arrays or shapes."""
        return self._map(
            state,
            lambda leaf, stored, index: jax.ShapeDtypeStruct(
                stored.unpadded_shape(leaf.shape[len(index) :]), leaf.dtype
            ),
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        )

    def restore_args(self, state: Tree) -> Tree:
        """Orbax restore arguments that read the keyed form with this layout's padding and devices.

        `state` may hold arrays or shapes, in stage-stacked form.
        """
        return self._map(
            state,
            lambda leaf, stored, index: _restore_args(
                leaf.shape[len(index) :], leaf.dtype, self._rank_sharding(stored, index)
            ),
            lambda leaf: _restore_args(
                leaf.shape, leaf.dtype, NamedSharding(self.mesh, PartitionSpec())
            ),
        )

    def to_stage_stacked(self, keyed: Tree, like: Tree) -> Tree:
        """Convert `keyed` to stage-stacked form; `like` is the state or its shapes in that form.

        The layers of `keyed` are deleted leaf by leaf, so that the two forms never exist in full at
        the same time.
        """
        spots, structure = jax.tree.flatten(like, is_leaf=is_stage_stacked)
        parts = structure.flatten_up_to(keyed)
        staged = [
            self._stack_tree(part, spot) if is_stage_stacked(spot) else part
            for part, spot in zip(parts, spots)
        ]
        return jax.tree.unflatten(structure, staged)

    def _map(self, state: Tree, part: LeafFunction, rest: Callable[[Any], Any]) -> Tree:
        """Convert stage-stacked trees to keyed form by `part`, and map other leaves by `rest`."""
        return jax.tree.map(
            lambda node: self._key_tree(node, part) if is_stage_stacked(node) else rest(node),
            state,
            is_leaf=is_stage_stacked,
        )

    def _key_tree(self, tree: Tree, part: LeafFunction) -> Tree:
        stored = self.sharding.param_shardings(tree)

        def layer(number: int) -> Tree:
            run, index = self.layout.place_of(number)

            def keyed(leaf: Any, how: ParamSharding) -> Any:
                how = how.without_leading_axis
                return part(leaf, how.without_leading_axis if index[1:] else how, index)

            return jax.tree.map(keyed, tree["layers"][run], stored["layers"][run])

        return {
            "embed_head": jax.tree.map(
                lambda leaf, how: part(leaf, how, ()), tree["embed_head"], stored["embed_head"]
            ),
            "layers": {str(i): layer(i) for i in range(self.layout.layers)},
        }

    def _stack_tree(self, keyed: Tree, like: Tree) -> Tree:
        specs = self.sharding.partition_specs(like)
        runs = []
        for number, (leaves, run_specs) in enumerate(zip(like["layers"], specs["layers"])):
            layers = self.layout.layers_of(number)
            runs.append(
                jax.tree.map(
                    lambda leaf, spec, *parts, indices=tuple(layers): self._stack_rows(
                        leaf, spec, dict(zip(indices, parts))
                    ),
                    leaves,
                    run_specs,
                    *(keyed["layers"][str(layer)] for layer in layers.values()),
                )
            )
        return {"embed_head": keyed["embed_head"], "layers": tuple(runs)}

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the stage-stacked state is stored."""
        return self.sharding.mesh

    def _rank_sharding(self, stored: ParamSharding, index: Index) -> NamedSharding:
        """The sharding of a layer's leaf over the devices of its pipeline rank; (): over all."""
        devices = self.mesh.devices[index[0] :][:1] if index else self.mesh.devices
        return NamedSharding(Mesh(devices, self.mesh.axis_names), stored.partition_spec)

    def _take_row(self, leaf: jax.Array, stored: ParamSharding, index: Index) -> jax.Array:
        """A layer's part of a leaf, as an array on its pipeline rank's devices; (): the leaf."""
        if not index:
            return leaf
        sharding = self._rank_sharding(stored, index)
        devices = sharding.device_set
        rows = [
            # moments may be in host memory (`train.offload_moments`)
            to_device(shard.data)[(0, *index[1:])]
            for shard in leaf.addressable_shards
            if shard.device in devices
        ]
        return jax.make_array_from_single_device_arrays(
            leaf.shape[len(index) :], sharding, rows, dtype=leaf.dtype
        )

    def _remove_padding(self, leaf: jax.Array, stored: ParamSharding, index: Index) -> Any:
        """A leaf, or a layer's part of it, in the form to write: without padding.

        Orbax needs chunks of equal size. The shards of an uneven vocabulary may have no common
        chunk longer than one row, so the array is first resharded over its other dim.
        """
        leaf = self._take_row(leaf, stored, index)
        if not any(stored.padding):
            return leaf
        shape = stored.unpadded_shape(leaf.shape)
        if stored.param.uneven and any(stored.padding[dim] for _, dim in stored.param.sharded):
            return _compile_reshard(shape, self._shard_other_dims(shape, stored))(to_device(leaf))
        return UnpaddedArray(leaf, shape)

    def _shard_other_dims(self, shape: tuple[int, ...], stored: ParamSharding) -> NamedSharding:
        """A sharding of an array of this shape over its dims without padding, on all devices."""
        axes, entries = [axis for entry in stored.dim_axes for axis in entry], []
        for size, padding in zip(shape, stored.padding):
            chosen_axes: list[str] = []
            for axis in () if padding else tuple(axes):
                if size % self.mesh.shape[axis] == 0:
                    size //= self.mesh.shape[axis]
                    axes.remove(axis)
                    chosen_axes.append(axis)
            entries.append(tuple(chosen_axes) or None)
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def _stack_rows(
        self, like: Any, spec: PartitionSpec, parts: dict[Index, jax.Array]
    ) -> jax.Array:
        """Stack layers into a leaf of a run and delete them; places without a layer hold zeros."""
        sharding = NamedSharding(self.mesh, spec)
        rows: dict[Any, dict[Index, jax.Array]] = {}
        for index, part in parts.items():
            for shard in part.addressable_shards:
                rows.setdefault(shard.device, {})[index[1:]] = shard.data
        stacked = any(index[1:] for index in parts)
        blank = np.zeros(sharding.shard_shape(like.shape)[1 + stacked :], like.dtype)
        places = [(row,) for row in range(like.shape[1])] if stacked else [()]

        def shard(device: jax.Device) -> jax.Array:
            own = rows.get(device, {})
            of_places = [
                own[place] if place in own else jax.device_put(blank, device) for place in places
            ]
            return (jnp.stack(of_places) if stacked else of_places[0])[None]

        shards = [shard(device) for device in sharding.addressable_devices]
        for part in parts.values():
            part.delete()
        return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


@cache
def _compile_reshard(
    shape: tuple[int, ...], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """A compiled function that slices an array to `shape` from the start and reshards it."""
    return jax.jit(lambda leaf: lax.slice(leaf, (0,) * len(shape), shape), out_shardings=sharding)


def _restore_args(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> ocp.ArrayRestoreArgs:
    """Restore arguments with `strict=False`: Orbax fills the padding beyond the file with zeros."""
    return ocp.ArrayRestoreArgs(dtype=dtype, sharding=sharding, global_shape=shape, strict=False)
