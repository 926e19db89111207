"""The form in which a state is on disk: keyed by what a thing is, not where it sat.

It is `{"params": tree, "optimizer": tree, "step": n}` in which every tree of parameters reads
`layers/<index>/<name>` and `ends/<name>`, whatever the mesh, the split or the schedule. A save
takes each layer from the devices of its rank; a restore puts it on those of its new one. Padding
for one number of replicas is not on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.checkpoint.handler import Unpadded
from jaxpipe.parallel import Sharding, StageLayout, Stored, is_stage_form
from jaxpipe.pipeline.buffers import to_device

Tree = Any
Part = Callable[[Any, Stored, int | None], Any]  # of a leaf, how it is stored, its layer's rank


@dataclass(frozen=True)
class Keying:
    """Turns stage form into layer-keyed form and back, without leaving the devices.

    Attributes:
      layout: which rank has which layer.
      sharding: how leaves are stored.

    The methods take a state: any tree in which trees in stage form stand, as parameters and moments
    do, and arrays beside them, such as the step.

    >>> import jax.numpy as jnp
    >>> from jaxpipe.parallel import make_mesh
    >>> layout, mesh = StageLayout((2,)), make_mesh(pp=1, devices=jax.devices()[:1])
    >>> layers = layout.stack([{"up": jnp.ones(8)}] * 2)
    >>> params = {"shared": {"norm": jnp.ones(4)}, "layers": layers}
    >>> keyed = Keying(layout, Sharding(mesh)).keyed_shapes({"params": params})["params"]
    >>> sorted(keyed), keyed["layers"]["1"]["up"].shape
    (['ends', 'layers'], (8,))
    """

    layout: StageLayout
    sharding: Sharding

    def keyed(self, state: Tree) -> Tree:
        """The state with every stage-form tree inside it layer-keyed, and without padding."""
        return self._map(state, self._written, lambda leaf: leaf)

    def rows(self, state: Tree) -> Tree:
        """The same with this layout's padding, as `restore_args` would have it read."""
        return self._map(state, self._take, lambda leaf: leaf)

    def keyed_shapes(self, state: Tree) -> Tree:
        """Shapes and dtypes that `keyed` would give; takes arrays or their shapes."""
        return self._map(
            state,
            lambda leaf, stored, rank: jax.ShapeDtypeStruct(
                stored.true_shape(_of_rank(leaf.shape, rank)), leaf.dtype
            ),
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        )

    def restore_args(self, state: Tree) -> Tree:
        """How Orbax is to read what `keyed` wrote: with this layout's padding, where it belongs."""
        return self._map(
            state,
            lambda leaf, stored, rank: _read_as(
                _of_rank(leaf.shape, rank), leaf.dtype, self._place(stored, rank)
            ),
            lambda leaf: _read_as(
                leaf.shape, leaf.dtype, NamedSharding(self.mesh, PartitionSpec())
            ),
        )

    def staged(self, keyed: Tree, like: Tree) -> Tree:
        """The inverse of `keyed`; `like` is the state (or its shapes) in stage form.

        Layers of `keyed` are given up leaf by leaf: it and the result never exist as wholes.
        """
        spots, structure = jax.tree.flatten(like, is_leaf=is_stage_form)
        parts = structure.flatten_up_to(keyed)
        staged = [
            self._stage(part, spot) if is_stage_form(spot) else part
            for part, spot in zip(parts, spots)
        ]
        return jax.tree.unflatten(structure, staged)

    def _map(self, state: Tree, part: Part, rest: Callable[[Any], Any]) -> Tree:
        """Trees layer-keyed, `part` of each leaf (rank None: of no layer), and `rest` of others."""
        return jax.tree.map(
            lambda node: self._key(node, part) if is_stage_form(node) else rest(node),
            state,
            is_leaf=is_stage_form,
        )

    def _key(self, tree: Tree, part: Part) -> Tree:
        stored = self.sharding.stored(tree)

        def layer(index: int) -> Tree:
            rank, slot = self.layout.place_of(index)
            return jax.tree.map(
                lambda leaf, how: part(leaf, how.of_rank, rank),
                tree["layers"][slot],
                stored["layers"][slot],
            )

        return {
            "ends": jax.tree.map(
                lambda leaf, how: part(leaf, how, None), tree["shared"], stored["shared"]
            ),
            "layers": {str(i): layer(i) for i in self._indices},
        }

    def _stage(self, keyed: Tree, like: Tree) -> Tree:
        specs = self.sharding.specs(like)
        layers = [keyed["layers"][str(i)] for i in self._indices]
        slots = []
        for slot, (leaves, slot_specs) in enumerate(zip(like["layers"], specs["layers"])):
            held = {
                rank: layers[row[slot]]
                for rank, row in enumerate(self.layout.table)
                if row[slot] is not None
            }
            slots.append(
                jax.tree.map(
                    lambda leaf, spec, *parts, ranks=tuple(held): self._put(
                        leaf, spec, dict(zip(ranks, parts))
                    ),
                    leaves,
                    slot_specs,
                    *held.values(),
                )
            )
        return {"shared": keyed["ends"], "layers": tuple(slots)}

    @property
    def mesh(self) -> Mesh:
        """The mesh of the stage form."""
        return self.sharding.mesh

    @property
    def _indices(self) -> range:
        return range(self.layout.layers)

    def _place(self, stored: Stored, rank: int | None) -> NamedSharding:
        """A leaf's on the devices of a rank, or on all."""
        devices = self.mesh.devices if rank is None else self.mesh.devices[rank : rank + 1]
        return NamedSharding(Mesh(devices, self.mesh.axis_names), stored.spec)

    def _take(self, leaf: jax.Array, stored: Stored, rank: int | None) -> jax.Array:
        """A leaf, or of a layer's its row `rank`: an array of that rank's devices."""
        if rank is None:
            return leaf
        sharding = self._place(stored, rank)
        devices = sharding.device_set
        rows = [
            to_device(shard.data)[0]  # moments may wait in its host's memory
            for shard in leaf.addressable_shards
            if shard.device in devices
        ]
        return jax.make_array_from_single_device_arrays(
            leaf.shape[1:], sharding, rows, dtype=leaf.dtype
        )

    def _written(self, leaf: jax.Array, stored: Stored, rank: int | None) -> Any:
        """A leaf, or a layer's row of it, as it is written: without padding.

        An uneven vocabulary has no pieces of one size, as Orbax wants them, but rows; it is divided
        along its other dim first.
        """
        leaf = self._take(leaf, stored, rank)
        if not any(stored.padding):
            return leaf
        shape = stored.true_shape(leaf.shape)
        if stored.leaf.uneven and any(stored.padding[dim] for _, dim in stored.leaf.cuts):
            return _resharded(shape, self._by_other_dims(shape, stored))(to_device(leaf))
        return Unpadded(leaf, shape)

    def _by_other_dims(self, shape: tuple[int, ...], stored: Stored) -> NamedSharding:
        """Parts of a leaf of this shape along the dims that have no padding, on all devices."""
        axes, entries = [axis for entry in stored.names for axis in entry], []
        for size, padding in zip(shape, stored.padding):
            own: list[str] = []
            for axis in () if padding else tuple(axes):
                if size % self.mesh.shape[axis] == 0:
                    size //= self.mesh.shape[axis]
                    axes.remove(axis)
                    own.append(axis)
            entries.append(tuple(own) or None)
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def _put(self, like: Any, spec: PartitionSpec, parts: dict[int, jax.Array]) -> jax.Array:
        """A stage leaf from its rows on their ranks, given up; ranks without a row hold zeros."""
        sharding = NamedSharding(self.mesh, spec)
        rows = {
            shard.device: shard.data[None]
            for part in parts.values()
            for shard in part.addressable_shards
        }
        for part in parts.values():
            part.delete()
        blank = np.zeros(sharding.shard_shape(like.shape), like.dtype)
        shards = [
            rows[device] if device in rows else jax.device_put(blank, device)
            for device in sharding.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


@cache
def _resharded(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Takes the first values of an array along every dim, and puts them where `sharding` says."""
    return jax.jit(lambda leaf: lax.slice(leaf, (0,) * len(shape), shape), out_shardings=sharding)


def _of_rank(shape: tuple[int, ...], rank: int | None) -> tuple[int, ...]:
    """Of a leaf's row, if it is a layer's."""
    return shape if rank is None else shape[1:]


def _read_as(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> ocp.ArrayRestoreArgs:
    """`strict=False`: what is longer than on disk has zeros at its end."""
    return ocp.ArrayRestoreArgs(dtype=dtype, sharding=sharding, global_shape=shape, strict=False)
