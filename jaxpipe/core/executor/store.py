"""Ring buffers shared between uses: one for all live values of a shape and dtype.

A pipeline rank with many live residuals has few live W stashes, and the other way round. One
program runs on all ranks, so ring buffers have the same length on every rank. In a shared ring
buffer every rank divides the entries among uses as it needs them, so the length is the largest
total of a rank and not the sum of the largest needs of every use.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.mesh.mesh import PP
from jaxpipe.core.schedule import Buffers

Values = tuple[jax.ShapeDtypeStruct, ...]
Index = int | jax.Array


def ring_lengths(
    uses: Mapping[str, Values], slots_of: Sequence[Buffers[int]]
) -> dict[jax.ShapeDtypeStruct, int]:
    """Return the length of the ring buffer of every shape and dtype, the most that a rank needs.

    Args:
      uses: by use (a field of `Buffers`), the values that one slot holds.
      slots_of: for every pipeline rank, the number of slots of each use.

    >>> small, large = (jax.ShapeDtypeStruct((size,), "float32") for size in (1, 9))
    >>> ranks = [Buffers(0, 4, 4, 1, 0, 0, 0, 0), Buffers(0, 1, 4, 4, 0, 0, 0, 0)]
    >>> lengths = ring_lengths({"for_b": (large, small), "stash": (large, large)}, ranks)
    >>> lengths[small], lengths[large]
    (4, 9)
    """
    counts = {use: Counter(values) for use, values in uses.items()}
    every = dict.fromkeys(form for values in uses.values() for form in values)
    return {
        form: max(sum(getattr(rank, use) * counts[use][form] for use in uses) for rank in slots_of)
        for form in every
    }


class _Place(NamedTuple):
    """Position of a value: for slot `s`, entry `first + stride * s` of the `ring`-th buffer."""

    ring: int
    first: int | jax.Array
    stride: int


@dataclass(frozen=True)
class RingStore:
    """The ring buffers of a ring group for some uses.

    Attributes:
      lengths: by shape and dtype, the length of a layer's part of the ring buffer.
      positions: by use, the position of every value within this part.
      layers: number of layers of the ring group; their parts follow each other.
      on_host: the ring buffers are in host memory, and values are copied there and back.
    """

    lengths: Mapping[jax.ShapeDtypeStruct, int]
    positions: Mapping[str, tuple[_Place, ...]]
    layers: int = 1
    on_host: bool = False

    @classmethod
    def of(
        cls, uses: Mapping[str, Values], slots_of: Sequence[Buffers[int]],
        *, layers: int = 1, on_host: bool = False,
    ) -> "RingStore":  # fmt: skip
        """Make the store; arguments as in `ring_lengths`. With several ranks, call in `shard_map`.

        The first entry of a value may differ between pipeline ranks.
        """
        lengths = ring_lengths(uses, slots_of)
        rings = {form: ring for ring, form in enumerate(lengths)}
        next_slots = {form: np.zeros(len(slots_of), np.int32) for form in lengths}
        places = {}
        for use, values in uses.items():
            strides, used, of_use = Counter(values), Counter(), []
            for form in values:
                first = _of_this_rank(next_slots[form] + used[form])
                of_use.append(_Place(rings[form], first, strides[form]))
                used[form] += 1
            for form, stride in strides.items():
                slots = [getattr(rank, use) for rank in slots_of]
                next_slots[form] = next_slots[form] + stride * np.array(slots, np.int32)
            places[use] = tuple(of_use)
        return cls(lengths, places, layers, on_host)

    def empty(self, *, fill: int = 0, poison: bool = False) -> tuple[jax.Array, ...]:
        """Return the ring buffers before the first write."""
        rings = tuple(
            buffers.make_ring(self.layers * length, form, fill=fill, poison=poison)
            for form, length in self.lengths.items()
        )
        return buffers.to_host(rings) if self.on_host else rings

    def read(
        self, rings: tuple[jax.Array, ...], use: str, slot: jax.Array, layer: Index
    ) -> tuple[Any, ...]:
        """Read the values of a layer in one slot of a use, into device memory.

        After the copy from host memory stands a barrier: XLA would make a reshape of the result a
        bitcast of the array on the host, and end with an error.
        """
        values = tuple(
            buffers.read(rings[place.ring], self._entry(place, slot, layer))
            for place in self.positions[use]
        )
        if not self.on_host:
            return values
        return tuple(map(lax.optimization_barrier, buffers.to_device(values)))

    def write(
        self, rings: tuple[jax.Array, ...], use: str, values: tuple[Any, ...], slot: jax.Array,
        layer: Index,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Return `rings` with `values` of a layer written to one slot of a use."""
        new = list(rings)
        values = buffers.to_host(values) if self.on_host else values
        for place, value in zip(self.positions[use], values, strict=True):
            where = self._entry(place, slot, layer)
            new[place.ring] = buffers.write(new[place.ring], value, where)
        return tuple(new)

    def poison(
        self, rings: tuple[jax.Array, ...], use: str, slot: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return `rings` with poison in one slot of a use, of every layer."""
        forms = tuple(self.lengths)
        of_use = (forms[place.ring] for place in self.positions[use])
        values = tuple(buffers.poisoned(form.shape, form.dtype) for form in of_use)
        for layer in range(self.layers):
            rings = self.write(rings, use, values, slot, layer)
        return rings

    def _entry(self, place: _Place, slot: jax.Array, layer: Index) -> jax.Array:
        """Return the entry of a layer's value in its ring buffer."""
        length = tuple(self.lengths.values())[place.ring]
        return layer * length + place.first + place.stride * slot


def _of_this_rank(values: np.ndarray) -> int | jax.Array:
    """Return this pipeline rank's entry of `values` [P]; a constant where all are equal."""
    if (values == values[0]).all():
        return int(values[0])
    return jnp.asarray(values)[lax.axis_index(PP)]
