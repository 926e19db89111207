"""F, B, W and BW of one chunk: the loop over its layers, and the rings where each leaves values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxpipe.parallel import DP, Stored
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.split import Layer, LayerSplit, Residuals
from jaxpipe.schedule import Op

Tree = Any
Row = dict[str, jax.Array]  # the tables' columns at this tick and rank, each a scalar


class Kept(NamedTuple):
    """What a gradient action reads of one layer slot; None where it reads nothing."""

    residuals: Residuals
    stash: Any

    @classmethod
    def read(cls, residuals: Residuals, stash: Any, row: Row, op: Op) -> "Kept":
        """From a layer slot's rings: W takes no `for_b`, and only W takes a stash."""
        for_b = None if op is Op.W else buffers.read(residuals.for_b, row["for_b_read"])
        for_w = buffers.read(residuals.for_w, row["for_w_read"])
        stash = buffers.read(stash, row["stash_read"]) if op is Op.W else None
        return cls(Residuals(for_b, for_w), stash)


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a rank computes.

    `layers[j]` are the parameters in layer slot j, `active[j]` whether this rank has a layer there
    (None: every rank does). Rings of residuals and stash come as one per layer slot. `gathered`
    says how the leaves of a layer are stored if only its part over dp is held: then every action
    gathers a layer when it comes to it, and adds to sums of its part.
    """

    layers: tuple[Tree, ...]
    active: tuple[jax.Array | None, ...]
    gathered: Tree = None

    def forward_only(self, layer: Layer, x: jax.Array, microbatch: Tree) -> jax.Array:
        """y, keeping nothing."""
        for slot in range(len(self.layers)):
            (x,) = self._if_active(
                slot, lambda x, slot=slot: (layer(self._params(slot), x, microbatch),), x
            )
        return x

    def forward(
        self,
        split: LayerSplit,
        x: jax.Array,
        microbatch: Tree,
        rings: Sequence[Residuals],
        row: Row,
    ) -> tuple[jax.Array, tuple[Residuals, ...]]:
        """F: y, and the rings with the residuals written."""
        rings = list(rings)
        for slot in range(len(self.layers)):

            def layer(
                x: jax.Array, ring: Residuals, slot: int = slot
            ) -> tuple[jax.Array, Residuals]:
                y, kept = split.forward(self._params(slot), x, microbatch)
                return y, Residuals(
                    buffers.write(ring.for_b, kept.for_b, row["for_b_write"]),
                    buffers.write(ring.for_w, kept.for_w, row["for_w_write"]),
                )

            x, rings[slot] = self._if_active(slot, layer, x, rings[slot])
        return x, tuple(rings)

    def gradient(
        self,
        split: LayerSplit,
        op: Op,
        dy: jax.Array,
        microbatch: Tree,
        kept: Callable[[int], Kept],
        stashes: Sequence[Any],
        totals: Sequence[Tree],
        row: Row,
        *,
        in_turn: bool = False,
    ) -> tuple[jax.Array, tuple[Any, ...], tuple[Tree, ...]]:
        """B, W or BW: dx (for W: dy), the rings of the stash, which B writes, and the totals.

        `kept(slot)` gives what the action reads of a layer slot; `totals` are the sums of gradients
        that it adds to. `in_turn`: in BW, W of a layer is done before B of the next but one begins;
        else XLA on GPU may put all W last, to hide collectives, and hold the stash of every layer
        (a tenth of the memory with 20 layers of the 70B, tp=4, full remat).
        """
        stashes, totals = list(stashes), list(totals)
        for slot in reversed(range(len(self.layers))):

            def layer(
                dy: jax.Array, total: Tree, stash: Any, slot: int = slot
            ) -> tuple[jax.Array, Tree, Any]:
                params, (residuals, stashed) = self._params(slot), kept(slot)
                match op:
                    case Op.BW:
                        dy, gradients = split.backward(params, microbatch, residuals, dy)
                    case Op.B:
                        dy, gradients, stashed = split.backward_input(
                            params, microbatch, residuals, dy
                        )
                        stash = buffers.write(stash, stashed, row["stash_write"])
                    case Op.W:
                        gradients = split.backward_weight(
                            params, microbatch, residuals.for_w, stashed
                        )
                return dy, self._add(total, gradients), stash

            dy, totals[slot], stashes[slot] = self._if_active(
                slot, layer, dy, totals[slot], stashes[slot]
            )
            if in_turn and op is Op.BW and slot + 1 < len(self.layers):
                dy, totals[slot + 1] = lax.optimization_barrier((dy, totals[slot + 1]))
        return dy, tuple(stashes), tuple(totals)

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
