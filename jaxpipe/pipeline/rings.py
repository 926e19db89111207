"""What one layer slot leaves in its rings, and where the tables say that it stands."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.cut import Residuals
from jaxpipe.schedule import Op, Row

Tree = Any
NOTHING = Residuals((), ())


class LeftByF(NamedTuple):
    """Rings that F writes: residuals, and the state of sequences in slices (None: whole ones)."""

    residuals: Residuals
    state: Tree

    def before(self, row: Row) -> Tree:
        """The state as the slices before this one left it."""
        return None if self.state is None else _begun(self.state, row.state, row.first_slice)

    def written(self, made: Residuals, state: Tree, row: Row) -> "LeftByF":
        """With what F made in its slots."""
        residuals = Residuals(
            buffers.write(self.residuals.for_b, made.for_b, row.for_b_write),
            buffers.write(self.residuals.for_w, made.for_w, row.for_w_write),
        )
        if self.state is None:
            return LeftByF(residuals, None)
        return LeftByF(residuals, buffers.write(self.state, state, row.state))


class LeftByB(NamedTuple):
    """Rings that gradients write: the stash, by B, and the gradient at the state, by B and BW."""

    stash: tuple[Any, ...]
    dstate: tuple[Any, ...]

    def after(self, row: Row) -> tuple[Any, ...]:
        """The gradient at the state as the slices after this one left it."""
        return _begun(self.dstate, row.dstate, row.last_slice) if self.dstate else ()

    def written(self, stash: tuple[Any, ...], dstate: tuple[Any, ...], row: Row) -> "LeftByB":
        """With what B or BW made in their slots; BW makes no stash and has no ring of it."""
        return LeftByB(
            buffers.write(self.stash, stash, row.stash_write) if self.stash else (),
            buffers.write(self.dstate, dstate, row.dstate) if self.dstate else (),
        )

    def of(self, op: Op) -> "LeftByB":
        """The rings that an op writes; in place of the others nothing."""
        return LeftByB(self.stash if op is Op.B else (), self.dstate if op in (Op.B, Op.BW) else ())

    def after_op(self, op: Op, written: "LeftByB") -> "LeftByB":
        """All rings, once an op has written those of `of`."""
        return LeftByB(
            written.stash if op is Op.B else self.stash,
            written.dstate if op in (Op.B, Op.BW) else self.dstate,
        )


class Kept(NamedTuple):
    """What a gradient action reads of one layer slot; None where it reads nothing."""

    residuals: Residuals
    stash: Any
    state: Tree
    dstate: tuple[Any, ...]

    @classmethod
    def read(cls, by_f: LeftByF, by_b: LeftByB, row: Row, op: Op) -> "Kept":
        """From a layer slot's rings: W takes a stash, the others `for_b` and what slices share."""
        for_w = buffers.read(by_f.residuals.for_w, row.for_w_read)
        if op is Op.W:
            return cls(Residuals(None, for_w), buffers.read(by_b.stash, row.stash_read), None, ())
        for_b = buffers.read(by_f.residuals.for_b, row.for_b_read)
        state = None if by_f.state is None else buffers.read(by_f.state, row.state_read)
        return cls(Residuals(for_b, for_w), None, state, by_b.after(row))


def _begun(ring: Tree, slot: jax.Array, begins: jax.Array) -> Tree:
    """What slices of a sequence have left for the next, zeros where it begins.

    The barrier ends the reading before the slot is written: else XLA copies the ring.
    """
    values = buffers.read(ring, slot)
    return lax.optimization_barrier(jax.tree.map(lambda value: jnp.where(begins, 0, value), values))
