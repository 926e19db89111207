"""The ring buffers of a ring group, and how actions read and write them by table slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.store import Index, RingStore, Values
from jaxpipe.core.schedule import Buffers, Op, TableRow
from jaxpipe.core.split.crossing import Residuals
from jaxpipe.core.split.split import LayerSplit, inexact

Tree = Any
NOTHING = Residuals((), ())


class RingBuffers(NamedTuple):
    """The ring buffers of a ring group (`LayerRuns`); an empty field has no buffers.

    Attributes:
      residuals: residuals, written by F; also the W stash, written by B, where they share.
      stash: the W stash, written by B, where it has ring buffers of its own.
      state: state between sequence slices, written by F; None: sequences are not sliced.
      dstate: gradient at the state, written by B and BW.
    """

    residuals: tuple[jax.Array, ...] = ()
    stash: tuple[jax.Array, ...] = ()
    state: Tree = None
    dstate: tuple[jax.Array, ...] = ()


class GradientInputs(NamedTuple):
    """What a gradient action reads from the ring buffers of a layer; None: not read."""

    residuals: Residuals
    stash: Any
    state: Tree
    dstate: tuple[Any, ...]


def values_by_use(
    residuals: Residuals, stash: Values, *, separate: bool
) -> tuple[dict[str, Values], ...]:
    """Group residuals and W stash by use, into one set of shared ring buffers or two.

    They are `separate` where residuals are offloaded to the host, and where cells pair F with B: in
    such a branch a shared ring buffer would make B wait for what F writes.
    """
    stored, stashed = {"for_b": residuals.for_b, "for_w": residuals.for_w}, {"stash": stash}
    return (stored, stashed) if separate else (stored | stashed, {})


@dataclass(frozen=True)
class RingBufferPlan:
    """How the ring buffers of a layer kind are used on this pipeline rank.

    Attributes:
      residuals: store of the residuals, and of the W stash if they share.
      stash: store of the W stash otherwise.
      state: shapes and dtypes of the state between sequence slices.
      slots: number of slots per use, the maximum over pipeline ranks.
      layers: number of layers of the ring group. The methods take the index of one.
    """

    residuals: RingStore
    stash: RingStore
    state: Tree
    slots: Buffers[int]
    layers: int = 1

    @classmethod
    def of(
        cls, split: LayerSplit | None, state: Tree, slots_of: Sequence[Buffers[int]],
        *, pairs: bool, layers: int = 1, on_host: bool = False,
    ) -> "RingBufferPlan":  # fmt: skip
        """Make the plan for the slot counts `slots_of` every pipeline rank.

        `split` is None in a forward-only pass, which stores only a state. `pairs`: some cell pairs
        F with a gradient action. `on_host`: residuals are stored in host memory.
        """
        values = (NOTHING, ()) if split is None else (split.residuals, split.stash)
        kept, stash = values_by_use(*values, separate=pairs or on_host)
        kept = RingStore.of(kept, slots_of, layers=layers, on_host=on_host)
        stash = RingStore.of(stash, slots_of, layers=layers)
        return cls(kept, stash, state, Buffers(*map(max, zip(*slots_of))), layers)

    @property
    def on_host(self) -> bool:
        """Whether residuals are stored in host memory."""
        return self.residuals.on_host

    def empty(self, group: int, *, poison: bool = False) -> RingBuffers:
        """Return the ring buffers of a ring group before the first tick."""

        def ring(slots: int, like: Tree) -> Tree:
            return jax.tree.map(
                lambda leaf: buffers.make_ring(self.layers * slots, leaf, poison=poison), like
            )

        # On the host every ring group starts with a different number: XLA would merge equal
        # buffers into one and copy it.
        return RingBuffers(
            self.residuals.empty(fill=group * self.on_host, poison=poison),
            self.stash.empty(poison=poison),
            ring(self.slots.state, self.state),
            ring(self.slots.dstate, inexact(self.state)) if self.slots.dstate else (),
        )

    def written_by(self, rings: RingBuffers, op: Op) -> RingBuffers:
        """Return the ring buffers that an op writes; other fields are empty."""
        return RingBuffers()._replace(
            **{name: getattr(rings, name) for name in self._written_by(op)}
        )

    def with_written(self, rings: RingBuffers, op: Op, part: RingBuffers) -> RingBuffers:
        """Return `rings` with those that an op writes replaced by `part`."""
        return rings._replace(**{name: getattr(part, name) for name in self._written_by(op)})

    def _written_by(self, op: Op) -> tuple[str, ...]:
        """Return the names of the `RingBuffers` fields that an op writes."""
        of_b = (self._stash_field, "dstate")
        return {Op.F: ("residuals", "state"), Op.B: of_b, Op.BW: ("dstate",), Op.W: ()}[op]

    def state_before(self, part: RingBuffers, row: TableRow, layer: Index) -> Tree:
        """Return the state that earlier slices of the sequence left; None without slices."""
        if part.state is None:
            return None
        slot = layer * self.slots.state + row.state
        return _read_or_zeros(part.state, slot, row.first_slice)

    def write_forward(
        self, part: RingBuffers, new: Residuals, state: Tree, row: TableRow, layer: Index
    ) -> RingBuffers:
        """Return the ring buffers of F with its residuals and state written to their slots."""
        rings = self.residuals.write(part.residuals, "for_b", new.for_b, row.for_b_write, layer)
        rings = self.residuals.write(rings, "for_w", new.for_w, row.for_w_write, layer)
        if state is not None:
            state = buffers.write(part.state, state, layer * self.slots.state + row.state)
        return RingBuffers(residuals=rings, state=state)

    def write_backward(
        self, part: RingBuffers, stash: tuple[Any, ...], dstate: tuple[Any, ...], row: TableRow,
        layer: Index,
    ) -> RingBuffers:  # fmt: skip
        """Return the ring buffers of B or BW with stash and dstate written; BW has no stash."""
        if stash:
            name = self._stash_field
            store, rings = getattr(self, name), getattr(part, name)
            rings = store.write(rings, "stash", stash, row.stash_write, layer)
            part = part._replace(**{name: rings})
        if part.dstate:
            slot = layer * self.slots.dstate + row.dstate
            part = part._replace(dstate=buffers.write(part.dstate, dstate, slot))
        return part

    def read(self, rings: RingBuffers, row: TableRow, op: Op, layer: Index) -> GradientInputs:
        """Read the inputs of a gradient action; only W reads a stash, and it reads no `for_b`."""
        for_w = self.residuals.read(rings.residuals, "for_w", row.for_w_read, layer)
        if op is Op.W:
            name = self._stash_field
            stash = getattr(self, name).read(getattr(rings, name), "stash", row.stash_read, layer)
            return GradientInputs(Residuals(None, for_w), stash, None, ())
        for_b = self.residuals.read(rings.residuals, "for_b", row.for_b_read, layer)
        state, dstate = None, ()
        if rings.state is not None:
            state = buffers.read(rings.state, layer * self.slots.state + row.state_read)
        if rings.dstate:
            slot = layer * self.slots.dstate + row.dstate
            dstate = _read_or_zeros(rings.dstate, slot, row.last_slice)
        return GradientInputs(Residuals(for_b, for_w), None, state, dstate)

    def poison(self, rings: RingBuffers, use: str, slot: jax.Array) -> RingBuffers:
        """Return `rings` with poison in one slot of a use."""
        name = "residuals" if use in self.residuals.positions else "stash"
        return rings._replace(**{name: getattr(self, name).poison(getattr(rings, name), use, slot)})

    @property
    def shares_stash(self) -> bool:
        """Whether B writes the W stash into the ring buffers of residuals."""
        return "stash" in self.residuals.positions

    @property
    def _stash_field(self) -> str:
        return "residuals" if self.shares_stash else "stash"


def _read_or_zeros(ring: Tree, slot: jax.Array, begins: jax.Array) -> Tree:
    """Read what the previous slice of a sequence left; zeros at the first (`begins`).

    The barrier ends the read before the slot is written; without it XLA copies the ring buffer.
    """
    values = buffers.read(ring, slot)
    return lax.optimization_barrier(jax.tree.map(lambda value: jnp.where(begins, 0, value), values))
