"""Conversion of a state between stage-stacked form and keyed form, the form on disk.

Keyed form is `{"params": tree, "optimizer": tree, "step": n}`. Every tree of parameters in it has
the keys `layers/<index>/<name>` and `embed_head/<name>`, whatever the mesh, split or
schedule. A save takes each layer from the devices of its pipeline rank, and a restore puts it on
the devices of its new pipeline rank. Padding, which depends on the number of shards, is not on
disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpipe.checkpoint.orbax_port.handler import UnpaddedArray, copy_to_host
from jaxpipe.core.executor.buffers import HOST, to_device, to_host
from jaxpipe.core.mesh import (
    ParamSharding,
    Sharding,
    StageLayout,
    is_stage_stacked,
    map_stage_stacked,
)

Tree = Any
Index = tuple[int, ...]  # of a layer in the arrays of its run (`place_of`); (): of no layer
Specs = tuple[PartitionSpec, ...]
GroupFunction = Callable[[Sequence[Any], Specs], list[jax.Array]]
LeafFunction = Callable[
    [Any, ParamSharding, Index], Any
]  # maps (leaf, the layer's ParamSharding, its index in the leaf) to the keyed leaf


@dataclass(frozen=True)
class StateKeying:
    """Converts stage-stacked form to keyed form and back.

    The methods take a state: a pytree that contains stage-stacked trees, such as parameters and
    moments, and other arrays, such as the step.

    Attributes:
      layout: which pipeline rank holds which layer.
      sharding: how parameters are stored on the mesh.

    >>> import jax.numpy as jnp
    >>> from jaxpipe.core.mesh import make_mesh
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
        """The state in keyed form, without padding, ready to be saved.

        Layers are copied to the host slot by slot, so the devices never hold copies of all.
        """
        unpadded = ParamSharding(())
        stored = self._map(state, lambda leaf, stored, index: stored, lambda leaf: unpadded)
        keyed = map_stage_stacked(partial(self._split_tree, hold=copy_to_host), state)
        return jax.tree.map(self._remove_padding, keyed, stored)

    def to_padded_keyed(self, state: Tree) -> Tree:
        """The state in keyed form with this layout's padding, as a restore returns it."""
        return map_stage_stacked(self._split_tree, state)

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

        `state` may hold arrays or shapes, in stage-stacked form. What its shardings keep in host
        memory is read into host memory.
        """
        return self._map(
            state,
            lambda leaf, stored, index: _restore_args(
                leaf.shape[len(index) :],
                leaf.dtype,
                self._rank_sharding(stored.partition_spec, index, leaf.sharding),
            ),
            lambda leaf: _restore_args(
                leaf.shape, leaf.dtype, NamedSharding(self.mesh, PartitionSpec())
            ),
        )

    def to_stage_stacked(self, keyed: Tree, like: Tree) -> Tree:
        """Convert `keyed` to stage-stacked form; `like` is the state or its shapes in that form.

        The layers of `keyed` are deleted slot by slot, those of a longer run leaf by leaf, so that
        the two forms never exist in full at the same time.
        """
        return jax.tree.map(
            lambda spot, part: self._stack_tree(part, spot) if is_stage_stacked(spot) else part,
            like, keyed, is_leaf=is_stage_stacked,
        )  # fmt: skip

    def _map(self, state: Tree, part: LeafFunction, rest: Callable[[Any], Any]) -> Tree:
        """Convert stage-stacked trees to keyed form by `part`, and map other leaves by `rest`."""
        return map_stage_stacked(lambda node: self._key_tree(node, part), state, rest)

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

    def _split_tree(self, tree: Tree, hold: Callable[[Tree], Tree] = lambda arrays: arrays) -> Tree:
        """A stage-stacked tree in keyed form: every layer on its pipeline rank's devices.

        `hold` maps the arrays of the layers of one layer slot to those that are returned.
        """
        specs = self.sharding.partition_specs(tree)["layers"]
        layers: dict[str, Tree] = {}
        for number, run in enumerate(tree["layers"]):
            leaves, structure = jax.tree.flatten(run)
            own = self.layout.layers_of(number)
            for place in dict.fromkeys(index[1:] for index in own):
                take = partial(_take_rows, place, self.mesh)
                rows = self._by_group(number, take, leaves, jax.tree.leaves(specs[number]))
                slot = {layer: index for index, layer in own.items() if index[1:] == place}
                held = hold(
                    [[self._of_rank(row, index) for row in rows] for index in slot.values()]
                )
                trees = (jax.tree.unflatten(structure, one) for one in held)
                layers |= dict(zip(map(str, slot), trees))
        return {"embed_head": jax.tree.map(_from_host, tree["embed_head"]), "layers": layers}

    def _stack_tree(self, keyed: Tree, like: Tree) -> Tree:
        specs, runs = self.sharding.partition_specs(like)["layers"], []
        for number, run in enumerate(like["layers"]):
            own = self.layout.layers_of(number)
            layers = (jax.tree.leaves(keyed["layers"][str(layer)]) for layer in own.values())
            leaves = [dict(zip(own, parts)) for parts in zip(*layers)]
            stacked = self._by_group(number, self._stack, leaves, jax.tree.leaves(specs[number]))
            runs.append(jax.tree.unflatten(jax.tree.structure(run), stacked))
        return {"embed_head": keyed["embed_head"], "layers": tuple(runs)}

    def _by_group(
        self, run: int, convert: GroupFunction, leaves: Sequence[Any], specs: Sequence[Any]
    ) -> list[jax.Array]:
        """Convert the leaves of a run, all by one program or, as they may be large, one by one."""
        size = max(len(leaves), 1) if len(self.layout.runs[run]) == 1 else 1
        groups = (slice(begin, begin + size) for begin in range(0, len(leaves), size))
        return [new for group in groups for new in convert(leaves[group], tuple(specs[group]))]

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the stage-stacked state is stored."""
        return self.sharding.mesh

    def _rank_sharding(
        self, spec: PartitionSpec, index: Index, like: NamedSharding | None = None
    ) -> NamedSharding:
        """The sharding of a layer's leaf over the devices of its pipeline rank; (): over all.

        In the kind of memory of `like`, if given.
        """
        devices = self.mesh.devices[index[0] :][:1] if index else self.mesh.devices
        memory = like.memory_kind if like else None
        return NamedSharding(Mesh(devices, self.mesh.axis_names), spec, memory_kind=memory)

    def _of_rank(self, row: jax.Array, index: Index) -> jax.Array:
        """A layer, from an array of `_take_rows`, as an array on its pipeline rank's devices."""
        assert isinstance(row.sharding, NamedSharding)
        sharding = self._rank_sharding(row.sharding.spec, index)
        devices = sharding.device_set
        shards = [shard.data for shard in row.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(
            row.shape, sharding, shards, dtype=row.dtype
        )

    def _remove_padding(self, leaf: Any, stored: ParamSharding) -> Any:
        """An array of the keyed form as it is written: without padding.

        Orbax needs chunks of equal size. The shards of an uneven vocabulary may have no common
        chunk longer than one row, so the array is first resharded over its other dim.
        """
        if not any(stored.padding):
            return leaf
        shape = stored.unpadded_shape(leaf.shape)
        if stored.param.uneven and any(stored.padding[dim] for _, dim in stored.param.sharded):
            return _compile_reshard(shape, self._shard_other_dims(shape, stored))(leaf)
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

    def _stack(self, leaves: Sequence[dict[Index, jax.Array]], specs: Specs) -> list[jax.Array]:
        """Stack layers into leaves of a run and delete them; places without a layer hold zeros."""
        rows = list(map(self._rows, leaves, specs))
        on_host = tuple(places[0].sharding.memory_kind == HOST for places in rows)
        stacked = _stack_rows(self.mesh, rows, specs, on_host)
        for layer in (layer for layers in leaves for layer in layers.values()):
            layer.delete()
        return stacked

    def _rows(self, layers: dict[Index, jax.Array], spec: PartitionSpec) -> list[jax.Array]:
        """The layers of a leaf, as an array of `_take_rows` for each layer slot."""
        index, like = next(iter(layers.items()))
        memory = like.sharding.memory_kind
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec[len(index) :]), memory_kind=memory)
        blank = np.zeros(sharding.shard_shape(like.shape), like.dtype)
        places: dict[Index, dict[jax.Device, jax.Array]] = {}
        for index, layer in layers.items():
            own = {shard.device: shard.data for shard in layer.addressable_shards}
            places.setdefault(index[1:], {}).update(own)

        def row(own: dict[jax.Device, jax.Array]) -> jax.Array:
            shards = [
                jax.device_put(
                    own.get(device, blank), SingleDeviceSharding(device, memory_kind=memory)
                )
                for device in sharding.addressable_devices
            ]
            return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)

        return [row(places[place]) for place in sorted(places)]


def _from_host(leaf: jax.Array) -> jax.Array:
    """The array, copied to the device if it is in host memory (`train.offload_moments`).

    NumPy would not copy it there, and a step could not donate it while it is written.
    """
    return to_device(leaf) if leaf.sharding.memory_kind == HOST else leaf


# In an array of a layer slot the devices of each pipeline rank hold their own layer, though its
# sharding says that they hold copies: so one program converts the slot on all devices.


@partial(jax.jit, static_argnames=("mesh", "specs"))
def _take_rows(place: Index, mesh: Mesh, leaves: list[jax.Array], specs: Specs) -> list[jax.Array]:
    """The arrays of one layer slot, from the leaves of a run."""
    return jax.shard_map(
        lambda leaves, place: [leaf[(0, *place)] for leaf in leaves],
        mesh=mesh,
        in_specs=(list(specs), PartitionSpec()),
        out_specs=[PartitionSpec(*spec[1 + len(place) :]) for spec in specs],
        check_vma=False,
    )(to_device(leaves), place)  # moments may be in host memory (`train.offload_moments`)


@partial(jax.jit, static_argnames=("mesh", "specs", "on_host"))
def _stack_rows(
    mesh: Mesh, rows: list[list[jax.Array]], specs: Specs, on_host: tuple[bool, ...]
) -> list[jax.Array]:
    """The leaves of a run `[P, ...]` or `[P, n, ...]`, from the arrays of its layer slots.

    `on_host`: which leaves stay in host memory.
    """
    leaves = jax.shard_map(
        lambda rows: [(jnp.stack(leaf) if len(leaf) > 1 else leaf[0])[None] for leaf in rows],
        mesh=mesh,
        in_specs=([PartitionSpec(*spec[1 + (len(rows[0]) > 1) :]) for spec in specs],),
        out_specs=list(specs),
        check_vma=False,
    )(to_device(rows))
    return [to_host(leaf) if stays else leaf for leaf, stays in zip(leaves, on_host)]


@cache
def _compile_reshard(
    shape: tuple[int, ...], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """A compiled function that slices an array to `shape` from the start and reshards it."""
    return jax.jit(
        lambda leaf: lax.slice(to_device(leaf), (0,) * len(shape), shape), out_shardings=sharding
    )


def _restore_args(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> ocp.ArrayRestoreArgs:
    """Restore arguments with `strict=False`: Orbax fills the padding beyond the file with zeros."""
    return ocp.ArrayRestoreArgs(dtype=dtype, sharding=sharding, global_shape=shape, strict=False)
