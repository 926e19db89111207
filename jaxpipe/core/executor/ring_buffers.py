"""The ring buffers of the layers of a ring group, and how actions read and write them.

Values of one shape and dtype share a ring buffer, whatever they are used for. A pipeline rank with
many live residuals has few live W stashes, and the other way round. One program runs on all ranks,
so ring buffers have the same length on every rank. In a shared ring buffer every rank divides the
entries among uses as it needs them, so the length is the largest total of a rank and not the sum of
the largest needs of every use.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.buffers import Index
from jaxpipe.core.mesh.mesh import PP
from jaxpipe.core.schedule import Buffers, Op, TableRow
from jaxpipe.core.split.crossing import Residuals
from jaxpipe.core.split.split import inexact

Values = tuple[jax.ShapeDtypeStruct, ...]


class RingArrays(NamedTuple):
    """The arrays of the ring buffers of a ring group; an empty field has no buffers.

    Attributes:
      residuals: residuals, written by F and R; also the W stash, written by B, where they share.
      stash: the W stash, written by B, where it has ring buffers of its own.
      state: state between sequence slices, written by F; None: sequences are not sliced.
      dstate: gradient at the state, written by B and BW.
    """

    residuals: tuple[jax.Array, ...] = ()
    stash: tuple[jax.Array, ...] = ()
    state: Tree = None
    dstate: tuple[jax.Array, ...] = ()


class GradientInputs(NamedTuple):
    """What a gradient action reads from the ring buffers of a layer; empty or None: not read."""

    residuals: Residuals
    stash: Any
    state: Tree
    dstate: tuple[Any, ...]


class _Place(NamedTuple):
    """Position of a value: for slot `s`, entry `first + stride * s` of a layer's part of a ring.

    The parts of the layers follow each other in the `ring`-th buffer, `length` entries each.
    """

    ring: int
    length: int
    first: Index
    stride: int

    def entry(self, slot: jax.Array, layer: Index) -> jax.Array:
        """Return the entry of a layer's value in its ring buffer."""
        return layer * self.length + self.first + self.stride * slot


def values_by_use(
    residuals: Residuals, stash: Values, *, separate: bool
) -> tuple[dict[str, Values], ...]:
    """Group residuals and W stash by use, into one set of shared ring buffers or two.

    They are `separate` where residuals are offloaded to the host, and where cells pair F with B: in
    such a branch a shared ring buffer would make B wait for what F writes.
    """
    by_b = {"stash": stash}
    by_f = {"for_b": residuals.for_b, "for_w": residuals.for_w, "for_r": residuals.for_r or ()}
    return (by_f, by_b) if separate else (by_f | by_b, {})


def ring_lengths(
    uses: Mapping[str, Values], slots_of: Sequence[Buffers[int]]
) -> dict[jax.ShapeDtypeStruct, int]:
    """Return the length of the ring buffer of every shape and dtype, the most that a rank needs.

    Args:
      uses: by use (a field of `Buffers`), the values that one slot holds.
      slots_of: for every pipeline rank, the number of slots of each use.

    >>> small, large = (jax.ShapeDtypeStruct((size,), "float32") for size in (1, 9))
    >>> ranks = [Buffers(0, 4, 4, 0, 1, 0, 0, 0, 0), Buffers(0, 1, 4, 0, 4, 0, 0, 0, 0)]
    >>> lengths = ring_lengths({"for_b": (large, small), "stash": (large, large)}, ranks)
    >>> lengths[small], lengths[large]
    (4, 9)
    """
    counts = {use: Counter(values) for use, values in uses.items()}
    every = dict.fromkeys(form for values in uses.values() for form in values)
    slots = np.array([[getattr(rank, use) for use in uses] for rank in slots_of])
    held = np.array([[of[form] for form in every] for of in counts.values()])
    return dict(zip(every, (slots @ held).max(axis=0).tolist())) if every else {}


@dataclass(frozen=True)
class RingBuffers:
    """Where the values of n layers of one kind are stored between actions, on a pipeline rank.

    Most methods take the `RingArrays` of the layers, or those that one op writes (`written_by`),
    and the index of one layer.

    Attributes:
      lengths: by field of `RingArrays` (residuals, stash), the length of a layer's part of the ring
        buffer of each shape and dtype.
      places: by use, the position of every value within a layer's part.
      state: shapes and dtypes of the state between sequence slices.
      slots: number of slots per use, the maximum over pipeline ranks.
      layers: number of layers.
      shares_stash: B writes the W stash into the ring buffers of residuals.
      on_host: residuals are in host memory, and are copied there and back.
    """

    lengths: Mapping[str, Mapping[jax.ShapeDtypeStruct, int]]
    places: Mapping[str, tuple[_Place, ...]]
    state: Tree
    slots: Buffers[int]
    layers: int
    shares_stash: bool
    on_host: bool

    @classmethod
    def of(
        cls, residuals: Residuals, stash: Values, state: Tree, slots_of: Sequence[Buffers[int]],
        *, pairs: bool, layers: int = 1, on_host: bool = False,
    ) -> "RingBuffers":  # fmt: skip
        """Lay out the ring buffers. With several pipeline ranks, call it in `shard_map`.

        Args:
          residuals, stash, state: shapes and dtypes of a layer's values of one microbatch.
          slots_of: for every pipeline rank, the number of slots of each use.
          pairs: some cell pairs F with a gradient action.
          layers, on_host: as of the class.
        """
        separate = pairs or on_host
        lengths: dict[str, dict[jax.ShapeDtypeStruct, int]] = {}
        places: dict[str, tuple[_Place, ...]] = {}
        by_use = values_by_use(residuals, stash, separate=separate)
        for field, uses in zip(("residuals", "stash"), by_use):
            lengths[field] = ring_lengths(uses, slots_of)
            places |= _places(uses, lengths[field], slots_of)
        slots = Buffers(*map(max, zip(*slots_of)))
        return cls(lengths, places, state, slots, layers, not separate, on_host)

    def empty(self, group: int, *, poison: bool = False) -> RingArrays:
        """Return the arrays of a ring group before the first tick."""

        def ring(slots: int, like: Any, fill: int = 0) -> jax.Array:
            return buffers.make_ring(self.layers * slots, like, fill=fill, poison=poison)

        def rings(field: str, fill: int = 0) -> tuple[jax.Array, ...]:
            return tuple(ring(length, like, fill) for like, length in self.lengths[field].items())

        # On the host every ring group starts with a different number: XLA would merge equal
        # buffers into one and copy it.
        residuals = rings("residuals", fill=group * self.on_host)
        if self.on_host:
            residuals = buffers.to_host(residuals)
        state = jax.tree.map(partial(ring, self.slots.state), self.state)
        dstate = inexact(self.state) if self.slots.dstate else ()
        dstate = tuple(ring(self.slots.dstate, like) for like in dstate)
        return RingArrays(residuals, rings("stash"), state, dstate)

    def written_by(self, arrays: RingArrays, op: Op) -> RingArrays:
        """Return the arrays that an op writes; other fields are empty."""
        return RingArrays()._replace(
            **{field: getattr(arrays, field) for field in self._written_by(op)}
        )

    def with_written(self, arrays: RingArrays, op: Op, written: RingArrays) -> RingArrays:
        """Return `arrays` with those that an op writes replaced by `written`."""
        return arrays._replace(**{field: getattr(written, field) for field in self._written_by(op)})

    def _written_by(self, op: Op) -> tuple[str, ...]:
        """Return the fields of `RingArrays` that an op writes."""
        of_b = (self._field("stash"), "dstate")
        of_f = ("residuals", "state")
        return {Op.F: of_f, Op.R: of_f[:1], Op.B: of_b, Op.BW: ("dstate",), Op.W: ()}[op]

    def state_before(self, arrays: RingArrays, row: TableRow, layer: Index) -> Tree:
        """Return the state that earlier slices of the sequence left; None without slices."""
        if arrays.state is None:
            return None
        slot = layer * self.slots.state + row.state
        return _read_or_zeros(arrays.state, slot, row.first_slice)

    def write_forward(
        self, arrays: RingArrays, new: Residuals, state: Tree, row: TableRow, layer: Index
    ) -> RingArrays:
        """Return the arrays of F with the residuals and state of a layer in their slots."""
        if row.recompute is None or new.for_r is None:
            arrays = self.write_residuals(arrays, new, row, layer)
        else:
            arrays = self._write(arrays, "for_r", new.for_r, row.recompute.for_r_write, layer)
        if state is not None:
            slot = layer * self.slots.state + row.state
            state = buffers.write(arrays.state, state, slot)
        return arrays._replace(state=state)

    def write_residuals(
        self, arrays: RingArrays, new: Residuals, row: TableRow, layer: Index
    ) -> RingArrays:
        """Return the arrays with a layer's residuals for B and W in their slots."""
        arrays = self._write(arrays, "for_b", new.for_b, row.for_b_write, layer)
        return self._write(arrays, "for_w", new.for_w, row.for_w_write, layer)

    def read_for_r(
        self, arrays: RingArrays, slot: jax.Array, layer: Index
    ) -> tuple[jax.Array, ...]:
        """Read what F stored for R."""
        return self._read(arrays, "for_r", slot, layer)

    def write_backward(
        self, arrays: RingArrays, stash: tuple[Any, ...], dstate: tuple[Any, ...], row: TableRow,
        layer: Index,
    ) -> RingArrays:  # fmt: skip
        """Return the arrays of B or BW with stash and dstate of a layer; BW has no stash."""
        if stash:
            arrays = self._write(arrays, "stash", stash, row.stash_write, layer)
        if arrays.dstate:
            slot = layer * self.slots.dstate + row.dstate
            arrays = arrays._replace(dstate=buffers.write(arrays.dstate, dstate, slot))
        return arrays

    def read(self, arrays: RingArrays, row: TableRow, op: Op, layer: Index) -> GradientInputs:
        """Read the inputs of a gradient action; only W reads a stash, and it reads no `for_b`."""
        for_w = self._read(arrays, "for_w", row.for_w_read, layer)
        if op is Op.W:
            stash = self._read(arrays, "stash", row.stash_read, layer)
            return GradientInputs(Residuals((), for_w), stash, None, ())
        for_b = self._read(arrays, "for_b", row.for_b_read, layer)
        state, dstate = None, ()
        if arrays.state is not None:
            state = buffers.read(arrays.state, layer * self.slots.state + row.state_read)
        if arrays.dstate:
            slot = layer * self.slots.dstate + row.dstate
            dstate = _read_or_zeros(arrays.dstate, slot, row.last_slice)
        return GradientInputs(Residuals(for_b, for_w), None, state, dstate)

    def poison(self, arrays: RingArrays, use: str, slot: jax.Array) -> RingArrays:
        """Return `arrays` with poison in one slot of a use, of every layer."""
        shapes = tuple(self.lengths[self._field(use)])
        of_use = (shapes[place.ring] for place in self.places[use])
        values = tuple(buffers.poisoned(like.shape, like.dtype) for like in of_use)
        for layer in range(self.layers):
            arrays = self._write(arrays, use, values, slot, layer)
        return arrays

    def _read(
        self, arrays: RingArrays, use: str, slot: jax.Array, layer: Index
    ) -> tuple[jax.Array, ...]:
        """Read the values of a layer in one slot of a use, into device memory.

        After the copy from host memory stands a barrier: XLA would make a reshape of the result a
        bitcast of the array on the host, and end with an error.
        """
        rings = getattr(arrays, self._field(use))
        values = tuple(
            buffers.read(rings[place.ring], place.entry(slot, layer)) for place in self.places[use]
        )
        if not self._is_on_host(use):
            return values
        return tuple(map(lax.optimization_barrier, buffers.to_device(values)))

    def _write(
        self, arrays: RingArrays, use: str, values: tuple[Any, ...], slot: jax.Array, layer: Index
    ) -> RingArrays:
        """Return `arrays` with `values` of a layer written to one slot of a use."""
        rings = list(getattr(arrays, self._field(use)))
        values = buffers.to_host(values) if self._is_on_host(use) else values
        for place, value in zip(self.places[use], values, strict=True):
            rings[place.ring] = buffers.write(rings[place.ring], value, place.entry(slot, layer))
        return arrays._replace(**{self._field(use): tuple(rings)})

    def _field(self, use: str) -> str:
        """Return the field of `RingArrays` with the values of a use."""
        return "stash" if use == "stash" and not self.shares_stash else "residuals"

    def _is_on_host(self, use: str) -> bool:
        return self.on_host and self._field(use) == "residuals"


def _places(
    uses: Mapping[str, Values],
    lengths: Mapping[jax.ShapeDtypeStruct, int],
    slots_of: Sequence[Buffers[int]],
) -> dict[str, tuple[_Place, ...]]:
    """Return by use the place of every value; its first entry may differ between pipeline ranks."""
    rings = {form: ring for ring, form in enumerate(lengths)}
    next_slots = {form: np.zeros(len(slots_of), np.int32) for form in lengths}
    places = {}
    for use, values in uses.items():
        strides, of_use = Counter(values), []
        used: Counter[jax.ShapeDtypeStruct] = Counter()
        for form in values:
            first = _of_this_rank(next_slots[form] + used[form])
            of_use.append(_Place(rings[form], lengths[form], first, strides[form]))
            used[form] += 1
        for form, stride in strides.items():
            slots = [getattr(rank, use) for rank in slots_of]
            next_slots[form] = next_slots[form] + stride * np.array(slots, np.int32)
        places[use] = tuple(of_use)
    return places


def _of_this_rank(values: np.ndarray) -> Index:
    """Return this pipeline rank's entry of `values` [P]; a constant where all are equal."""
    if (values == values[0]).all():
        return int(values[0])
    return jnp.asarray(values)[lax.axis_index(PP)]


def _read_or_zeros(ring: Tree, slot: jax.Array, begins: jax.Array) -> Tree:
    """Read what the previous slice of a sequence left; zeros at the first (`begins`).

    The barrier ends the read before the slot is written; without it XLA copies the ring buffer.
    """
    values = buffers.read(ring, slot)
    return lax.optimization_barrier(jax.tree.map(lambda value: jnp.where(begins, 0, value), values))
