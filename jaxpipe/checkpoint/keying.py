"""The form in which a state is on disk: keyed by what a thing is, not where it sat.

It is `{"params": tree, "optimizer": tree, "step": n}` in which every tree of parameters reads
`layers/<index>/<name>` and `ends/<name>`, whatever the mesh, the split or the schedule. A save
takes each layer from the devices of its rank; a restore puts it on those of its new one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.parallel import Sharding, StageLayout, is_stage_form

Tree = Any


@dataclass(frozen=True)
class Keying:
    """Turns stage form into layer-keyed form and back, without leaving the devices."""

    layout: StageLayout
    sharding: Sharding

    def keyed(self, state: Tree) -> Tree:
        """The state with every stage-form tree inside it layer-keyed."""
        return self._map(state, self._key)

    def keyed_shapes(self, state: Tree) -> Tree:
        """Shapes, dtypes and shardings that `keyed` would give; takes arrays or their shapes."""
        return self._map(state, self._key_shapes, leaf=self._replicated)

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

    def _map(
        self, state: Tree, stage: Callable[[Tree], Tree], leaf: Callable[[Any], Any] = lambda x: x
    ) -> Tree:
        return jax.tree.map(
            lambda node: stage(node) if is_stage_form(node) else leaf(node),
            state,
            is_leaf=is_stage_form,
        )

    def _key(self, tree: Tree) -> Tree:
        def layer(index: int) -> Tree:
            rank, slot = self.layout.place_of(index)
            return jax.tree.map(lambda leaf: self._take(leaf, rank), tree["layers"][slot])

        return {"ends": tree["shared"], "layers": {str(i): layer(i) for i in self._indices}}

    def _key_shapes(self, tree: Tree) -> Tree:
        specs = self.sharding.specs(tree)

        def end(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)
            )

        def layer(index: int) -> Tree:
            rank, slot = self.layout.place_of(index)
            return jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(
                    leaf.shape[1:], leaf.dtype, sharding=self._on_rank(rank, spec)
                ),
                tree["layers"][slot],
                specs["layers"][slot],
            )

        return {
            "ends": jax.tree.map(end, tree["shared"], specs["shared"]),
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

    def _on_rank(self, rank: int, spec: PartitionSpec) -> NamedSharding:
        """One rank's part of the mesh, with a stage leaf's spec less its leading rank axis."""
        mesh = Mesh(self.mesh.devices[rank : rank + 1], self.mesh.axis_names)
        return NamedSharding(mesh, PartitionSpec(*spec[1:]))

    def _replicated(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _take(self, leaf: jax.Array, rank: int) -> jax.Array:
        """Row `rank` of a stage leaf, as an array of that rank's devices."""
        sharding = self._on_rank(rank, leaf.sharding.spec)
        devices = sharding.device_set
        rows = [shard.data[0] for shard in leaf.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(
            leaf.shape[1:], sharding, rows, dtype=leaf.dtype
        )

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
