"""F, B, W and BW of one chunk: the loop over its layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxpipe.contract import Context, Side
from jaxpipe.parallel import DP, Stored
from jaxpipe.pipeline.kind import RunKind, add_side
from jaxpipe.pipeline.rings import Kept, Rings
from jaxpipe.pipeline.split import Cotangent
from jaxpipe.schedule import Op, Row

Tree = Any


@dataclass(frozen=True)
class LayerSlot:
    """A layer slot of a chunk, on one rank.

    Attributes:
      kind: of its layer.
      params: the layer's parameters, or with `stored` this device's part of them.
      index: which layer of the model it is.
      active: whether this rank has a layer there; None: every rank does.
      ring: which ring slot it uses.
      stored: how the leaves are stored if only a part over the replicas is held: then every action
        gathers the layer when it comes to it, and adds to sums of its part.
    """

    kind: RunKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    stored: Tree = None

    @property
    def on_host(self) -> bool:
        """Whether what it leaves for backward waits in the host's memory."""
        return self.kind.rings.on_host

    def whole(self) -> Tree:
        """The layer's whole parameters."""
        if self.stored is None:
            return self.params
        return jax.tree.map(lambda how, part: how.whole(part), self.stored, self.params)

    def added(self, totals: Tree, gradients: Tree) -> Tree:
        """Totals plus gradients, in the totals' own dtype; None where there is nothing to add."""

        def add(total: jax.Array, gradient: jax.Array | None, *stored: Stored) -> jax.Array:
            if gradient is None:
                return total
            gradient = gradient.astype(total.dtype)
            if stored and stored[0].dim(DP) is not None:
                gradient = stored[0].reduce(gradient, stored[0].shards)
            return total + gradient

        stored = () if self.stored is None else (self.stored,)
        return jax.tree.map(add, totals, gradients, *stored)

    def if_active(self, layer: Callable[..., tuple[Any, ...]], *passed: Any) -> tuple[Any, ...]:
        """Run the layer, or pass everything on where this rank has none here."""
        if self.active is None:
            return layer(*passed)
        return lax.cond(self.active, lambda: layer(*passed), lambda: passed)


class Given(NamedTuple):
    """What an action is given beside what rings hold.

    `rows` are its microbatch's, `dloss` is the gradient at the losses that layers make.
    """

    row: Row
    rows: Tree
    variables: Tree
    dloss: jax.Array

    def context(self, slot: LayerSlot, state: Tree) -> Context:
        """For the layer in a slot."""
        return Context(self.rows, slot.index, state, self.variables)


class Made(NamedTuple):
    """What F leaves: y, the rings, sums and maxima, and the losses of its layers (None: none)."""

    y: jax.Array
    rings: tuple[Rings, ...]
    side: Side
    loss: jax.Array | None


class Gradients(NamedTuple):
    """What a gradient action changes: dx (W: nothing), rings, and the sums by layer slot."""

    dx: jax.Array
    rings: tuple[Rings, ...]
    totals: tuple[Tree, ...]


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a rank computes."""

    slots: tuple[LayerSlot, ...]

    def forward(self, given: Given, before: Made) -> Made:
        """F of the chunk on `before.y`, which is x."""
        x, rings, side, loss = before
        rings = list(rings)
        for place, slot in enumerate(self.slots):

            def run(
                x: jax.Array, ring: Rings, side: Side, loss: Any, slot: LayerSlot = slot
            ) -> tuple[jax.Array, Rings, Side, Any]:
                plan = slot.kind.rings
                context = given.context(slot, plan.before_f(ring, given.row))
                output, kept = slot.kind.forward(slot.whole(), x, context)
                more = output.side.loss
                loss = loss if more is None else loss + more.astype(loss.dtype)
                ring = plan.after_f(ring, kept, output.state, given.row)
                return output.y, ring, add_side(side, output.side), loss

            x, rings[slot.ring], side, loss = slot.if_active(run, x, rings[slot.ring], side, loss)
            if place and (before := self.slots[place - 1]).on_host:
                # What it left has had this layer's time to be copied.
                x, rings[before.ring] = lax.optimization_barrier((x, rings[before.ring]))
        return Made(x, tuple(rings), side, loss)

    def gradient(
        self, op: Op, given: Given, before: Gradients, kept: Callable[[int, Rings], Kept],
        *, in_turn: bool = False,
    ) -> Gradients:  # fmt: skip
        """B, W or BW on `before.dx`, which is dy.

        `kept` gives what it reads, by ring slot and the rings there as the op finds them.

        `in_turn`: in BW, W of a layer is done before B of the next but one begins; else XLA on GPU
        may put all W last, to hide collectives, and hold the stash of every layer (a tenth of the
        memory with 20 layers of the 70B, tp=4, full remat).
        """
        dy, rings, totals = before.dx, list(before.rings), list(before.totals)
        last = len(self.slots) - 1
        for place, slot in reversed(list(enumerate(self.slots))):

            def layer(*before: Any, slot: LayerSlot = slot) -> tuple[jax.Array, Tree, Rings]:
                return _layer_gradient(op, slot, given, kept(slot.ring, before[-1]), before)

            dy, totals[place], rings[slot.ring] = slot.if_active(
                layer, dy, totals[place], rings[slot.ring]
            )
            if in_turn and op is Op.BW and place < last:
                dy, totals[place + 1] = lax.optimization_barrier((dy, totals[place + 1]))
        return Gradients(dy, tuple(rings), tuple(totals))


def _layer_gradient(
    op: Op, slot: LayerSlot, given: Given, kept: Kept, before: tuple[jax.Array, Tree, Rings]
) -> tuple[jax.Array, Tree, Rings]:
    """B, W or BW of one layer: dx, the sums of its gradients, and what B and BW leave.

    `before` has dy, and the sums and rings as they were.
    """
    dy, total, ring = before
    if op is Op.B and slot.kind.rings.pooled:
        # All is read before anything is written to the same ring: else XLA copies it.
        kept, ring = lax.optimization_barrier((kept, ring))
    params, split = slot.whole(), slot.kind.split
    context, loss = given.context(slot, kept.state), split.output.side.loss
    dloss = None if loss is None else given.dloss.astype(loss.dtype)
    if op is Op.W:
        gradients = split.backward_weight(params, context, kept.residuals.for_w, kept.stash, dloss)
        return dy, slot.added(total, gradients), ring
    at_output, stash = Cotangent(dy, kept.dstate, dloss), ()
    if op is Op.BW:
        dx, gradients = split.backward(params, context, kept.residuals, at_output)
    else:
        dx, gradients, stash = split.backward_input(params, context, kept.residuals, at_output)
    ring = slot.kind.rings.after_b(ring, stash, dx.state, given.row)
    return dx.value, slot.added(total, gradients), ring
