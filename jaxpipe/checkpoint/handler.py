"""How Orbax writes and reads arrays of which a process may hold all, a part or nothing.

A layer lives on the devices of its rank, so in a run of several processes most hold no part of it.
Orbax writes arrays that span all processes and takes one that a single process holds for a mistake;
here that is the rule, and each process writes and reads what it holds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp


class _Held:
    """An array as Orbax writes it, without being one that it refuses."""

    def __init__(self, array: jax.Array):
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _HeldArrays(ocp.type_handlers.ArrayHandler):
    """Writes and reads the arrays of which this process holds a part, and skips the others."""

    def __init__(self):
        # Any process may be the only one that has an array, so each writes its description too.
        super().__init__(primary_host=None, use_replica_parallel=False)

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Start writing what this process holds."""
        args = args or [ocp.SaveArgs()] * len(values)
        held = [
            (_Held(value), info, arg)
            for value, info, arg in zip(values, infos, args)
            if value.addressable_shards
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


def state_handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler of trees, for trees of arrays held as they may be.

    Nothing is compressed: of float32 that saves a twelfth of the disk, and what waits to be written
    would take a third more memory.
    """
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _HeldArrays()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
