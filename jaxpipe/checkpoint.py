"""Checkpoints keyed by what a thing is, not where it sat.

On disk a state is `{"params": tree, "optimizer": tree, "step": n}` in which every tree of
parameters reads `layers/<index>/<name>` and `ends/<name>`, whatever the mesh, the split or the
schedule. A save takes each layer from the devices of its rank; a restore puts it on those of its
new one. Any plain Orbax program can read the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.config import ConfigError
from jaxpipe.parallel import Sharding, StageLayout, is_stage_form

Tree = Any
FORMAT = 1  # raised when the keys on disk change


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
        """The inverse of `keyed`; `like` is the state (or its shapes) in stage form."""
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
        return jax.make_array_from_single_device_arrays(leaf.shape[1:], sharding, rows)

    def _put(self, like: Any, spec: PartitionSpec, parts: dict[int, jax.Array]) -> jax.Array:
        """A stage leaf from its rows on their ranks; ranks without a row hold zeros."""
        sharding = NamedSharding(self.mesh, spec)
        rows = {
            shard.device: shard.data[None]
            for part in parts.values()
            for shard in part.addressable_shards
        }
        blank = np.zeros(sharding.shard_shape(like.shape), like.dtype)
        shards = [
            rows[device] if device in rows else jax.device_put(blank, device)
            for device in sharding.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


class Checkpoints:
    """The checkpoints of one run: a context manager that waits for pending saves on leaving.

    Raises `ConfigError` where the directory cannot be written.
    """

    def __init__(self, directory: Path, *, keep: int, asynchronous: bool, keying: Keying):
        self.directory = directory.absolute()
        self.keying = keying
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {directory} ({error.strerror}): make it a "
                f"writable directory or choose another run.dir."
            ) from error
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Start saving; returns once the state is copied from the devices, if asynchronous."""
        if step in self.steps:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(self.keying.keyed(state)),
                meta=ocp.args.JsonSave(meta | {"format": FORMAT, "step": step}),
            ),
        )

    def restore(self, like: Tree, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]] | None:
        """The newest readable `(state, meta)` in the form of `like`, or None if there is none.

        `like` is a state in stage form, or only its shapes.

        A damaged checkpoint is renamed out of the way, said, and the one before it is taken.
        Raises `ConfigError` for a checkpoint of another model, naming the first differing leaf.
        """
        shapes = self.keying.keyed_shapes(like)
        for step in reversed(self.steps):
            try:
                stored = self._manager.item_metadata(step)["state"]
                if stored is None:
                    raise ValueError("its metadata cannot be read")
                _check_same_model(shapes, stored, self.directory / str(step))
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(shapes), meta=ocp.args.JsonRestore()
                    ),
                )
            except ConfigError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds on damaged files
                aside = self._set_aside(step)
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                say(
                    f"checkpoint {step} is damaged ({reason}): moved to {aside}, "
                    f"trying the one before"
                )
                continue
            return self.keying.staged(restored["state"], like), restored["meta"]
        return None

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / f"damaged-{step}"
        (self.directory / str(step)).rename(aside)
        self._manager.reload()
        return aside


def _check_same_model(expected: Tree, stored: Tree, where: Path) -> None:
    def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
        leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
        return {_name(path): tuple(leaf.shape) for path, leaf in leaves}

    want, have = shapes(expected), shapes(stored)
    for name in sorted({*want, *have}, key=lambda name: (not name.startswith("params"), name)):
        if want.get(name) != have.get(name):
            raise ConfigError(
                f"checkpoint {where} is of another model: {name} has shape "
                f"{have.get(name, 'none (absent)')} there and {want.get(name, 'none (absent)')} in "
                f"this configuration; change [model] back or use another run.dir."
            )


def _name(path: tuple[Any, ...]) -> str:
    """A tree path as `params/layers/17/attn/wq`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
