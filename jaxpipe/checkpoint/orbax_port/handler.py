"""Orbax handlers for arrays of which a process may hold all, some or no shards.

A layer lives on the devices of its pipeline rank, so in a multi-process run most processes hold no
shard of it. Orbax expects arrays that span all processes and rejects an array of a single process;
these handlers accept it, and each process writes and reads the shards on its own devices.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.checkpoint.integrity import write_checksums
from jaxpipe.runtime.storage.errors import retry
from jaxpipe.runtime.storage.files import open_path


class _ArrayProxy:
    """A proxy of an array, or of what has its attributes, that Orbax does not reject.

    It rejects a `jax.Array` of which a process has no shard.
    """

    def __init__(self, array: Any):
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class HostArray(_ArrayProxy):
    """An array as it is written, of which the devices hold nothing any more: its copy on the host.

    Orbax writes shards that are arrays of jax, so they are on the host's CPU device.

    Attributes:
      addressable_shards: as of a `jax.Array`; the data of replicas, which are not written, is only
        a shape.
    """

    def __init__(self, array: jax.Array, device: jax.Device):
        super().__init__(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding))
        self.addressable_shards = [
            SimpleNamespace(
                data=jax.ShapeDtypeStruct(shard.data.shape, array.dtype)
                if shard.replica_id
                else jax.device_put(np.asarray(shard.data), device),
                index=shard.index,
                replica_id=shard.replica_id,
            )
            for shard in array.addressable_shards
        ]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for shard in self.addressable_shards:
            if not shard.replica_id:
                whole[shard.index] = shard.data
        return np.asarray(whole, dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]


def copy_to_host(arrays: Any) -> Any:
    """A tree of arrays as `HostArray`s; as it is where `JAX_PLATFORMS` leaves out the CPU.

    Returns when all are copied, so that their memory on the devices can be used again.
    """
    try:
        (device, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        return arrays
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            if not shard.replica_id:
                shard.data.copy_to_host_async()
    return jax.tree.map(lambda array: HostArray(array, device), arrays)


class UnpaddedArray(_ArrayProxy):
    """A padded array as it is written: with its unpadded `shape`.

    The padding is zeros at the end of one dim. Orbax writes chunks of equal size. Every shard is
    therefore split into chunks whose length divides both the shard's and the unpadded length, and
    chunks of padding are not written.
    """

    def __init__(self, array: jax.Array | HostArray, shape: tuple[int, ...]):
        super().__init__(array)
        self.shape = shape

    @property
    def sharding(self) -> NamedSharding:
        """Replicated: the number of devices need not divide the unpadded shape."""
        return NamedSharding(self._array.sharding.mesh, PartitionSpec())

    @property
    def addressable_shards(self) -> list[Any]:
        """This process's chunks, after a dummy entry that tells Orbax the chunk shape.

        The dummy entry is not written, because its `replica_id` is None.
        """
        shards = self._array.addressable_shards
        (axis,) = (i for i, size in enumerate(self.shape) if size != self._array.shape[i])
        part = shards[0].data.shape
        length = math.gcd(part[axis], self.shape[axis])
        size = jax.ShapeDtypeStruct((*part[:axis], length, *part[axis + 1 :]), self.dtype)
        chunks = [SimpleNamespace(data=size, replica_id=None)]
        for shard in (shard for shard in shards if shard.replica_id == 0):
            begin = shard.index[axis].start or 0
            for i, data in enumerate(_split(shard.data, part[axis] // length, axis)):
                here = slice(begin + i * length, begin + (i + 1) * length)
                if here.stop <= self.shape[axis]:
                    index = (*shard.index[:axis], here, *shard.index[axis + 1 :])
                    chunks.append(SimpleNamespace(data=data, index=index, replica_id=0))
        return chunks

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array[tuple(map(slice, self.shape))], dtype, copy=copy)


_split = jax.jit(jnp.split, static_argnums=(1, 2))  # one dispatch for all chunks of a shard


class _LocalShardHandler(ocp.type_handlers.ArrayHandler):
    """Writes and reads the arrays of which this process holds shards, and skips the others."""

    def __init__(self):
        # Any process may be the only one that holds an array, so each writes array metadata too.
        # Without a sharding file plain Orbax restores onto the devices that it finds; with one it
        # asks for the devices that saved the checkpoint.
        super().__init__(
            primary_host=None, use_replica_parallel=False, enable_write_sharding_file=False
        )

    async def serialize(
        self,
        values: Sequence[jax.Array | HostArray | UnpaddedArray],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        """Start writing the shards that this process holds."""
        args = args or [ocp.SaveArgs()] * len(values)
        held = [
            (value if isinstance(value, _ArrayProxy) else _ArrayProxy(value), info, arg)
            for value, info, arg in zip(values, infos, args)
            if value.sharding.addressable_devices
        ]
        return await super().serialize(*map(list, zip(*held))) if held else []

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        """Read this process's shards; arrays without shards here are returned empty."""
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
    """Orbax's pytree handler, which also writes a checksum of every file."""

    async def async_save(self, directory: Any, *_: Any, args: "StateSave") -> Any:
        """Start writing; checksums of this process's files follow in the background."""
        futures = await super().async_save(directory, args=args)
        process = jax.process_index()
        written = ocp.future.ChainedFuture(
            futures or [],
            partial(
                retry, lambda: write_checksums(open_path(directory), process), _place(directory)
            ),
        )
        return [written]

    def finalize(self, directory: Any) -> None:
        """Merge the files of all processes and write checksums of the files that belong to none.

        Orbax calls it on the first process after all processes have written.
        """
        retry(lambda: super(StateHandler, self).finalize(directory), _place(directory))
        retry(lambda: write_checksums(open_path(directory)), _place(directory))


def _place(item: Any) -> str:
    """The directory of checkpoints that an item of one belongs to."""
    return str(open_path(item).parent.parent)


@ocp.args.register_with_handler(StateHandler, for_save=True)
class StateSave(ocp.args.PyTreeSave):
    """Arguments of a save with `StateHandler`."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
class StateRestore(ocp.args.PyTreeRestore):
    """Arguments of a restore with `StateHandler`."""


def make_state_handler() -> StateHandler:
    """A `StateHandler` for arrays that any subset of the processes may hold.

    It does not compress: compression saves a twelfth of the disk for float32, and pending writes
    would take a third more memory.
    """
    arrays = _LocalShardHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        *((kind, arrays) for kind in (jax.Array, HostArray, UnpaddedArray))
    )
    return StateHandler(type_handler_registry=registry, use_compression=False)
