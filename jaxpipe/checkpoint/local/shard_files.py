"""Files with the shards of a state that one process holds, and arrays on a mesh from such files.

A piece is two files: the bytes of the shards, one after the other, and an index of them in JSON,
with their checksum. The pieces of all processes have every value of a state in keyed form once,
without padding, so that a run restores them on another mesh.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpipe.checkpoint.exclusion import leaves_by_name
from jaxpipe.checkpoint.integrity import (
    DamagedError,
    add_checksum,
    checksum_of_file,
    is_as_written,
)
from jaxpipe.checkpoint.orbax_port.handler import HostArray
from jaxpipe.runtime import position
from jaxpipe.runtime.storage import files as storage

Tree = Any
Bounds = tuple[tuple[int, int], ...]  # start and stop in every dim


class SavedShard(NamedTuple):
    """A part of an array in a piece.

    Attributes:
      name: of the array in keyed form, as "params/layers/3/attn/wq".
      dtype: its name.
      shape: of the array, without padding.
      bounds: of the part in the array.
      offset: of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bounds: Bounds
    offset: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def bytes(self) -> int:
        """The size of the part."""
        return math.prod(self.sizes) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Piece:
    """What one process holds of a state: its shards, and what all processes know of the state.

    Attributes:
      shards: in the order of the file.
      meta: the metadata of the checkpoint.
      checksum: of the shards' bytes.
    """

    shards: Sequence[SavedShard]
    meta: dict[str, Any]
    checksum: str

    @classmethod
    def parse(cls, index: bytes) -> "Piece":
        """Read an index; raises `DamagedError` where it is not as it was written."""
        try:
            entries = json.loads(index)
        except ValueError as error:
            raise DamagedError("its index is not JSON") from error
        if not is_as_written(entries):
            raise DamagedError("its index is not as it was written")
        shards = [
            SavedShard(name, dtype, tuple(shape), tuple(map(tuple, bounds)), offset)
            for name, dtype, shape, bounds, offset in entries["shards"]
        ]
        return cls(shards, entries["meta"], entries["checksum"])


def copy_shards(keyed: Tree) -> tuple[list[SavedShard], list[np.ndarray]]:
    """The shards that this process writes of a state in keyed form, copied to the host.

    Of equal shards on several devices one process writes one. The copies do not change with the
    devices' buffers, which the next step overwrites.
    """
    found = [
        (name, leaf, shard)
        for name, leaf in leaves_by_name(keyed).items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    for _, _, shard in found:
        shard.data.copy_to_host_async()
    shards, values, offset = [], [], 0
    for name, leaf, shard in found:
        bounds = _bounds_of(shard.index, leaf.shape)
        shards.append(
            SavedShard(name, jnp.dtype(leaf.dtype).name, tuple(leaf.shape), bounds, offset)
        )
        on_host = isinstance(leaf, HostArray)  # and nothing else writes there
        values.append(np.asarray(shard.data) if on_host else np.array(shard.data))
        offset += shards[-1].bytes
    return shards, values


def write_piece(
    path: Path, shards: Sequence[SavedShard], values: Sequence[np.ndarray], meta: dict[str, Any]
) -> None:
    """Write `path.bin`, and then `path.json`, without which a piece does not count."""
    checksum = xxhash.xxh3_128()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".bin").open("wb") as file:
        for value in values:
            data = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            checksum.update(data)
            file.write(data)
            position.beat()
    index = {"shards": shards, "meta": meta, "checksum": checksum.hexdigest()}
    storage.write_whole(path.with_suffix(".json"), json.dumps(add_checksum(index)).encode())


def check_piece(path: Path) -> None:
    """Raise `DamagedError` where the files of a piece are not as they were written."""
    piece, data = Piece.parse(path.with_suffix(".json").read_bytes()), path.with_suffix(".bin")
    if checksum_of_file(data) != piece.checksum:
        raise DamagedError(f"{data} is not as it was written")


def assemble(target: Any, parts: Sequence[tuple[SavedShard, Callable[[], bytes]]]) -> jax.Array:
    """An array on this process's devices from the shards that overlap with theirs.

    Args:
      target: its `global_shape`, with padding, which becomes zero, its `dtype` and `sharding`.
      parts: all shards of the array, each with a function that reads its bytes, which is called
        for those that this process needs.
    """
    shape, sharding, dtype = target.global_shape, target.sharding, jnp.dtype(target.dtype)
    blocks: dict[Bounds, np.ndarray] = {}
    places = _places(sharding, shape)
    for bounds in places.values():
        blocks.setdefault(bounds, np.zeros([stop - start for start, stop in bounds], dtype))
    for shard, read in parts:
        overlaps = {
            bounds: both
            for bounds in blocks
            if (both := _overlap(bounds, shard.bounds)) is not None
        }
        if not overlaps:
            continue
        values = np.frombuffer(read(), jnp.dtype(shard.dtype)).reshape(shard.sizes)
        for bounds, both in overlaps.items():
            blocks[bounds][_within(both, bounds)] = values[_within(both, shard.bounds)]
    arrays = [
        jax.device_put(
            blocks[bounds], SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
        for device, bounds in places.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def _places(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Bounds]:
    """What each device of this process holds of an array."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: _bounds_of(at, shape) for device, at in indices.items() if at is not None}


def _bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _overlap(one: Bounds, other: Bounds) -> Bounds | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return both if all(start < stop for start, stop in both) else None


def _within(part: Bounds, full: Bounds) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, full))
