"""Values that wait on a rank: one ring for all of a shape and dtype, whatever they wait for.

A rank that holds many residuals holds few stashes, and the other way round. In one ring the places
of a rank are divided among uses as that rank needs them, so that the rings of all ranks, which one
program sizes alike, are as large as the rank with most needs them, not as the most of every use.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.parallel.mesh import PP
from jaxpipe.pipeline import buffers
from jaxpipe.schedule import Buffers

Values = tuple[jax.ShapeDtypeStruct, ...]


def ring_lengths(
    uses: Mapping[str, Values], slots_of: Sequence[Buffers[int]]
) -> dict[jax.ShapeDtypeStruct, int]:
    """Places in the ring of every shape and dtype: those of the rank that needs most.

    `uses` has the values of one slot by their use, a field of `Buffers`; `slots_of` has, for every
    rank, how many slots a use has.

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
    """Where a value stands: in slot `s` at `first + stride * s` of a ring."""

    ring: int
    first: int | jax.Array
    stride: int


@dataclass(frozen=True)
class Store:
    """The rings of one layer slot for some uses, and where a value stands in them.

    `on_host`: the rings are in the host's memory, and values are copied there and back.
    """

    lengths: Mapping[jax.ShapeDtypeStruct, int]
    places: Mapping[str, tuple[_Place, ...]]
    on_host: bool = False

    @classmethod
    def of(
        cls, uses: Mapping[str, Values], slots_of: Sequence[Buffers[int]], *, on_host: bool = False
    ) -> "Store":
        """For `ring_lengths` of the same; within a `shard_map` where there are several ranks."""
        lengths = ring_lengths(uses, slots_of)
        rings = {form: ring for ring, form in enumerate(lengths)}
        taken = {form: np.zeros(len(slots_of), np.int32) for form in lengths}
        places = {}
        for use, values in uses.items():
            strides, met, of_use = Counter(values), Counter(), []
            for form in values:
                first = _of_this_rank(taken[form] + met[form])
                of_use.append(_Place(rings[form], first, strides[form]))
                met[form] += 1
            for form, stride in strides.items():
                slots = [getattr(rank, use) for rank in slots_of]
                taken[form] = taken[form] + stride * np.array(slots, np.int32)
            places[use] = tuple(of_use)
        return cls(lengths, places, on_host)

    def empty(self, *, fill: int = 0, poison: bool = False) -> tuple[jax.Array, ...]:
        """The rings before anything is written."""
        rings = tuple(
            buffers.make_ring(length, form, fill=fill, poison=poison)
            for form, length in self.lengths.items()
        )
        return buffers.to_host(rings) if self.on_host else rings

    def read(self, rings: tuple[jax.Array, ...], use: str, slot: jax.Array) -> tuple[Any, ...]:
        """The values in a slot of a use, on the device."""
        values = tuple(
            buffers.read(rings[place.ring], place.first + place.stride * slot)
            for place in self.places[use]
        )
        return buffers.to_device(values) if self.on_host else values

    def write(
        self, rings: tuple[jax.Array, ...], use: str, values: tuple[Any, ...], slot: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The rings with values in a slot of a use."""
        new = list(rings)
        values = buffers.to_host(values) if self.on_host else values
        for place, value in zip(self.places[use], values, strict=True):
            where = place.first + place.stride * slot
            new[place.ring] = buffers.write(new[place.ring], value, where)
        return tuple(new)

    def spoil(
        self, rings: tuple[jax.Array, ...], use: str, slot: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The rings with poison in a slot of a use."""
        forms = tuple(self.lengths)
        found = (forms[place.ring] for place in self.places[use])
        values = tuple(buffers.poisoned(form.shape, form.dtype) for form in found)
        return self.write(rings, use, values, slot)


def _of_this_rank(values: np.ndarray) -> int | jax.Array:
    """This rank's value; a constant where all have the same."""
    if (values == values[0]).all():
        return int(values[0])
    return jnp.asarray(values)[lax.axis_index(PP)]
