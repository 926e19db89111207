"""F, B, W and BW of one chunk: the loop over its layers, and the rings where each leaves values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel import DP, Stored
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.carry import LeftByB, LeftByF
from jaxpipe.pipeline.split import Layer, LayerSplit, Residuals
from jaxpipe.schedule import Op, Row

Tree = Any


class Kept(NamedTuple):
    """What a gradient action reads of one layer slot; None where it reads nothing."""

    residuals: Residuals
    stash: Any
    state: Tree
    dstate: Tree

    @classmethod
    def read(cls, by_f: LeftByF, by_b: LeftByB, row: Row, op: Op) -> "Kept":
        """From a layer slot's rings: W takes a stash, the others `for_b` and what slices share."""
        for_w = buffers.read(by_f.residuals.for_w, row.for_w_read)
        if op is Op.W:
            stash = buffers.read(by_b.stash, row.stash_read)
            return cls(Residuals(None, for_w), stash, None, None)
        for_b = buffers.read(by_f.residuals.for_b, row.for_b_read)
        state = None if by_f.state is None else buffers.read(by_f.state, row.state_read)
        dstate = _state(by_b.dstate, row.dstate, begins=row.last_slice)
        return cls(Residuals(for_b, for_w), None, state, dstate)


def _state(ring: Tree, slot: jax.Array, begins: jax.Array) -> Tree:
    """What slices of a sequence have left for the next, zeros where it begins; None of whole ones.

    The barrier ends the reading before the slot is written: else XLA copies the ring.
    """
    if ring is None:
        return None
    values = buffers.read(ring, slot)
    return lax.optimization_barrier(jax.tree.map(lambda value: jnp.where(begins, 0, value), values))


def _joined(x: jax.Array, state: Tree) -> Tree:
    """x as a layer takes it: alone, or with the state."""
    return x if state is None else (x, state)


def _parted(y: Tree, ring: Tree, slot: jax.Array) -> tuple[jax.Array, Tree]:
    """y alone, and the ring with the state that came with it written."""
    if ring is None:
        return y, None
    y, state = y
    return y, buffers.write(ring, state, slot)


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a rank computes.

    `layers[j]` are the parameters in layer slot j, `active[j]` whether this rank has a layer there
    (None: every rank does). Rings come as one of each kind per layer slot. `gathered` says how the
    leaves of a layer are stored if only its part over dp is held: then every action gathers a layer
    when it comes to it, and adds to sums of its part.
    """

    layers: tuple[Tree, ...]
    active: tuple[jax.Array | None, ...]
    gathered: Tree = None

    def forward(
        self, layer: Layer | LayerSplit, x: jax.Array, microbatch: Tree, rings: Sequence[LeftByF],
        row: Row,
    ) -> tuple[jax.Array, tuple[LeftByF, ...]]:  # fmt: skip
        """F: y, and the rings with residuals and state written; an uncut layer has no residuals."""
        rings = list(rings)
        for slot in range(len(self.layers)):

            def run(x: jax.Array, ring: LeftByF, slot: int = slot) -> tuple[jax.Array, LeftByF]:
                state = _state(ring.state, row.state, begins=row.first_slice)
                given, kept = _joined(x, state), ring.residuals
                if isinstance(layer, LayerSplit):
                    y, made = layer.forward(self._params(slot), given, microbatch)
                    kept = Residuals(
                        buffers.write(kept.for_b, made.for_b, row.for_b_write),
                        buffers.write(kept.for_w, made.for_w, row.for_w_write),
                    )
                else:
                    y = layer(self._params(slot), given, microbatch)
                y, state = _parted(y, ring.state, row.state)
                return y, LeftByF(kept, state)

            x, rings[slot] = self._if_active(slot, run, x, rings[slot])
        return x, tuple(rings)

    def gradient(
        self,
        split: LayerSplit,
        op: Op,
        dy: jax.Array,
        microbatch: Tree,
        kept: Callable[[int], Kept],
        rings: Sequence[LeftByB],
        totals: Sequence[Tree],
        row: Row,
        *,
        in_turn: bool = False,
    ) -> tuple[jax.Array, tuple[LeftByB, ...], tuple[Tree, ...]]:
        """B, W or BW: dx (for W: dy), the rings that B writes and the totals.

        `kept(slot)` gives what the action reads of a layer slot; `totals` are the sums of gradients
        that it adds to. `in_turn`: in BW, W of a layer is done before B of the next but one begins;
        else XLA on GPU may put all W last, to hide collectives, and hold the stash of every layer
        (a tenth of the memory with 20 layers of the 70B, tp=4, full remat).
        """
        rings, totals = list(rings), list(totals)
        for slot in reversed(range(len(self.layers))):

            def layer(
                dy: jax.Array, total: Tree, ring: LeftByB, slot: int = slot
            ) -> tuple[jax.Array, Tree, LeftByB]:
                params, (residuals, stashed, state, dstate) = self._params(slot), kept(slot)
                if op is Op.W:
                    gradients = split.backward_weight(params, microbatch, residuals.for_w, stashed)
                    return dy, self._add(total, gradients), ring
                stash, given = ring.stash, (microbatch, residuals, _joined(dy, dstate), state)
                if op is Op.BW:
                    dx, gradients = split.backward(params, *given)
                else:
                    dx, gradients, made = split.backward_input(params, *given)
                    stash = buffers.write(stash, made, row.stash_write)
                dx, dstate = _parted(dx, ring.dstate, row.dstate)
                return dx, self._add(total, gradients), LeftByB(stash, dstate)

            dy, totals[slot], rings[slot] = self._if_active(
                slot, layer, dy, totals[slot], rings[slot]
            )
            if in_turn and op is Op.BW and slot + 1 < len(self.layers):
                dy, totals[slot + 1] = lax.optimization_barrier((dy, totals[slot + 1]))
        return dy, tuple(rings), tuple(totals)

    def _if_active(
        self, slot: int, layer: Callable[..., tuple[Any, ...]], *passed: Any
    ) -> tuple[Any, ...]:
        """Run a slot's layer, or pass everything on where this rank has no layer there."""
        active = self.active[slot]
        if active is None:
            return layer(*passed)
        return lax.cond(active, lambda: layer(*passed), lambda: passed)

    def _params(self, slot: int) -> Tree:
        """A slot's whole parameters."""
        if self.gathered is None:
            return self.layers[slot]
        return jax.tree.map(lambda s, part: s.gather(part, {DP}), self.gathered, self.layers[slot])

    def _add(self, totals: Tree, gradients: Tree) -> Tree:
        """Totals plus gradients, in the totals' own dtype; None where there is nothing to add."""

        def add(total: jax.Array, gradient: jax.Array | None, *stored: Stored) -> jax.Array:
            if gradient is None:
                return total
            gradient = gradient.astype(total.dtype)
            if stored and stored[0].axis(DP) is not None:
                gradient = stored[0].reduce(gradient, {DP})
            return total + gradient

        stored = () if self.gathered is None else (self.gathered,)
        return jax.tree.map(add, totals, gradients, *stored)
