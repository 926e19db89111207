"""How Orbax writes and reads arrays of which a process may hold all, a part or nothing.

A layer lives on the devices of its rank, so in a run of several processes most hold no part of it.
Orbax writes arrays that span all processes and takes one that a single process holds for a mistake;
here that is the rule, and each process writes and reads what it holds.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.checkpoint.integrity import write_checksums


class _Held:
    """An array as Orbax writes it, without being one that it refuses."""

    def __init__(self, array: jax.Array):
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class Unpadded(_Held):
    """An array as it is on disk: of this shape, less the zeros at the end of one axis.

    Orbax writes pieces of one size. So the parts of devices are split into as long ones as they
    consist of on every device, and those of zeros are left out.
    """

    def __init__(self, array: jax.Array, shape: tuple[int, ...]):
        super().__init__(array)
        self.shape = shape

    @property
    def sharding(self) -> NamedSharding:
        """The one that its own shape can have: the devices do not divide it."""
        return NamedSharding(self._array.sharding.mesh, PartitionSpec())

    @property
    def addressable_shards(self) -> list[Any]:
        """The pieces of this process, after one that is not written: it says how large they are."""
        shards = self._array.addressable_shards
        (axis,) = (i for i, size in enumerate(self.shape) if size != self._array.shape[i])
        part = shards[0].data.shape
        length = math.gcd(part[axis], self.shape[axis])
        size = jax.ShapeDtypeStruct((*part[:axis], length, *part[axis + 1 :]), self.dtype)
        found = [SimpleNamespace(data=size, replica_id=None)]
        for shard in (shard for shard in shards if shard.replica_id == 0):
            begin = shard.index[axis].start or 0
            for i, data in enumerate(_split(shard.data, part[axis] // length, axis)):
                here = slice(begin + i * length, begin + (i + 1) * length)
                if here.stop <= self.shape[axis]:
                    index = (*shard.index[:axis], here, *shard.index[axis + 1 :])
                    found.append(SimpleNamespace(data=data, index=index, replica_id=0))
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array[tuple(map(slice, self.shape))], dtype, copy=copy)


_split = jax.jit(jnp.split, static_argnums=(1, 2))  # in one program


class _HeldArrays(ocp.type_handlers.ArrayHandler):
    """Writes and reads the arrays of which this process holds a part, and skips the others."""

    def __init__(self):
        # Any process may be the only one that has an array, so each writes its description too.
        # Without a file of shardings plain Orbax reads arrays onto whatever devices it finds; with
        # one it asks for the devices that saved them.
        super().__init__(
            primary_host=None, use_replica_parallel=False, enable_write_sharding_file=False
        )

    async def serialize(
        self,
        values: Sequence[jax.Array | Unpadded],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        """Start writing what this process holds."""
        args = args or [ocp.SaveArgs()] * len(values)
        held = [
            (value if isinstance(value, Unpadded) else _Held(value), info, arg)
            for value, info, arg in zip(values, infos, args)
            if value.sharding.addressable_devices
        ]
        return await super().serialize(*map(list, zip(*held))) if held else []

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        """The arrays, with what this process is to hold of them."""
        assert args is not None  # `restore_args` gives every array's sharding
        held = [bool(arg.sharding.addressable_devices) for arg in args]
        read = []
        if any(held):
            wanted = ([one for one, here in zip(each, held) if here] for each in (infos, args))
            read = await super().deserialize(*wanted)
        found = iter(read)
        return [
            next(found)
            if here
            else jax.make_array_from_single_device_arrays(
                arg.global_shape, arg.sharding, [], dtype=arg.dtype
            )
            for arg, here in zip(args, held)
        ]


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler of trees, which also writes a checksum of every file."""

    async def async_save(self, directory: Any, *_: Any, args: "StateSave") -> Any:
        """Start writing; checksums of what this process writes follow in the background."""
        futures = await super().async_save(directory, args=args)
        process = jax.process_index()
        written = ocp.future.ChainedFuture(
            futures or [], lambda: write_checksums(Path(directory), process)
        )
        return [written]

    def finalize(self, directory: Any) -> None:
        """On the first process, after all have written: the files of all, and their checksums."""
        super().finalize(directory)
        write_checksums(Path(directory))


@ocp.args.register_with_handler(StateHandler, for_save=True)
class StateSave(ocp.args.PyTreeSave):
    """What Orbax is to save with a `StateHandler`."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
class StateRestore(ocp.args.PyTreeRestore):
    """What Orbax is to restore with a `StateHandler`."""


def state_handler() -> StateHandler:
    """A handler of trees of arrays held as they may be.

    Nothing is compressed: of float32 that saves a twelfth of the disk, and what waits to be written
    would take a third more memory.
    """
    arrays = _HeldArrays()
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (Unpadded, arrays)
    )
    return StateHandler(type_handler_registry=registry, use_compression=False)
