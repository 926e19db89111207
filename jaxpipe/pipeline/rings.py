"""What one layer slot leaves in its rings, and where the tables say that it stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.cut import Residuals
from jaxpipe.pipeline.split import LayerSplit, inexact
from jaxpipe.pipeline.store import Store, Values
from jaxpipe.schedule import Buffers, Op, Row

Tree = Any
NOTHING = Residuals((), ())


class Rings(NamedTuple):
    """The rings of a layer slot, by who writes them; empty where there is nothing to write.

    Attributes:
      kept: residuals, by F; where B and F never share a branch also the stash, by B.
      stash: by B, if not there.
      state: what slices of a sequence leave for each other, by F; None: sequences are whole.
      dstate: the gradient at it, by B and BW.
    """

    kept: tuple[jax.Array, ...] = ()
    stash: tuple[jax.Array, ...] = ()
    state: Tree = None
    dstate: tuple[jax.Array, ...] = ()


class Kept(NamedTuple):
    """What a gradient action reads of one layer slot; None where it reads nothing."""

    residuals: Residuals
    stash: Any
    state: Tree
    dstate: tuple[Any, ...]


def sharing(residuals: Residuals, stash: Values, *, apart: bool) -> tuple[dict[str, Values], ...]:
    """The values that share rings, by use: residuals and stash, or each alone.

    They are `apart` where residuals wait on the host, and where there are pairs: these run F and B
    in one branch, neither of which may wait for what the other writes.
    """
    kept, stashed = {"for_b": residuals.for_b, "for_w": residuals.for_w}, {"stash": stash}
    return (kept, stashed) if apart else (kept | stashed, {})


@dataclass(frozen=True)
class RingPlan:
    """How the rings of one kind of layer are used, on this rank."""

    kept: Store
    stash: Store
    state: Tree
    slots: Buffers[int]

    @classmethod
    def of(
        cls, split: LayerSplit | None, state: Tree, slots_of: Sequence[Buffers[int]],
        *, pairs: bool, on_host: bool = False,
    ) -> "RingPlan":  # fmt: skip
        """For so many slots of every rank; a layer that is not cut leaves only a state.

        `on_host`: residuals wait in the host's memory.
        """
        values = (NOTHING, ()) if split is None else (split.residuals, split.stash)
        kept, stash = sharing(*values, apart=pairs or on_host)
        kept = Store.of(kept, slots_of, on_host=on_host)
        slots = Buffers(*map(max, zip(*slots_of)))
        return cls(kept, Store.of(stash, slots_of), state, slots)

    @property
    def on_host(self) -> bool:
        """Whether residuals wait in the host's memory."""
        return self.kept.on_host

    def empty(self, layer_slot: int, *, poison: bool = False) -> Rings:
        """The rings of a layer slot before the first tick."""

        def ring(slots: int, like: Tree) -> Tree:
            return jax.tree.map(lambda leaf: buffers.make_ring(slots, leaf, poison=poison), like)

        # On the host each begins with another number: of equal ones XLA makes one and copies it.
        return Rings(
            self.kept.empty(fill=layer_slot * self.on_host, poison=poison),
            self.stash.empty(poison=poison),
            ring(self.slots.state, self.state),
            ring(self.slots.dstate, inexact(self.state)) if self.slots.dstate else (),
        )

    def part(self, rings: Rings, op: Op) -> Rings:
        """The rings that an op writes; in place of the others nothing."""
        return Rings()._replace(**{name: getattr(rings, name) for name in self._written_by(op)})

    def after(self, rings: Rings, op: Op, part: Rings) -> Rings:
        """All rings, once an op has written its part of them."""
        return rings._replace(**{name: getattr(part, name) for name in self._written_by(op)})

    def _written_by(self, op: Op) -> tuple[str, ...]:
        """Names of rings."""
        of_b = "kept" if self.pooled else "stash"
        return {Op.F: ("kept", "state"), Op.B: (of_b, "dstate"), Op.BW: ("dstate",), Op.W: ()}[op]

    def before_f(self, part: Rings, row: Row) -> Tree:
        """The state as the slices before this one left it."""
        return None if part.state is None else _begun(part.state, row.state, row.first_slice)

    def after_f(self, part: Rings, made: Residuals, state: Tree, row: Row) -> Rings:
        """F's rings with what it made in its slots."""
        kept = self.kept.write(part.kept, "for_b", made.for_b, row.for_b_write)
        kept = self.kept.write(kept, "for_w", made.for_w, row.for_w_write)
        if state is not None:
            state = buffers.write(part.state, state, row.state)
        return Rings(kept=kept, state=state)

    def after_b(
        self, part: Rings, stash: tuple[Any, ...], dstate: tuple[Any, ...], row: Row
    ) -> Rings:
        """The rings of B or BW with what they made in their slots; BW makes no stash."""
        if stash and self.pooled:
            kept = self.kept.write(part.kept, "stash", stash, row.stash_write)
            part = part._replace(kept=kept)
        elif stash:
            own = self.stash.write(part.stash, "stash", stash, row.stash_write)
            part = part._replace(stash=own)
        if part.dstate:
            part = part._replace(dstate=buffers.write(part.dstate, dstate, row.dstate))
        return part

    def read(self, rings: Rings, row: Row, op: Op) -> Kept:
        """What an op takes: W a stash, the others `for_b` and what slices share."""
        for_w = self.kept.read(rings.kept, "for_w", row.for_w_read)
        if op is Op.W:
            store, held = (self.kept, rings.kept) if self.pooled else (self.stash, rings.stash)
            return Kept(Residuals(None, for_w), store.read(held, "stash", row.stash_read), None, ())
        for_b = self.kept.read(rings.kept, "for_b", row.for_b_read)
        state = None if rings.state is None else buffers.read(rings.state, row.state_read)
        dstate = _begun(rings.dstate, row.dstate, row.last_slice) if rings.dstate else ()
        return Kept(Residuals(for_b, for_w), None, state, dstate)

    def spoil(self, rings: Rings, use: str, slot: jax.Array) -> Rings:
        """The rings with poison in a slot of a use."""
        if use in self.kept.places:
            return rings._replace(kept=self.kept.spoil(rings.kept, use, slot))
        return rings._replace(stash=self.stash.spoil(rings.stash, use, slot))

    @property
    def pooled(self) -> bool:
        """Whether B writes its stash into the rings of residuals."""
        return "stash" in self.kept.places


def _begun(ring: Tree, slot: jax.Array, begins: jax.Array) -> Tree:
    """What slices of a sequence have left for the next, zeros where it begins.

    The barrier ends the reading before the slot is written: else XLA copies the ring.
    """
    values = buffers.read(ring, slot)
    return lax.optimization_barrier(jax.tree.map(lambda value: jnp.where(begins, 0, value), values))
