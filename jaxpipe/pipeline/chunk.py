"""F, B, W and BW of one chunk: the loop over its layers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.contract import Context, Side
from jaxpipe.parallel import DP, Stored
from jaxpipe.pipeline.kind import RunKind, add_side, larger
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
      reduced: makes of the sums of its gradients what this device keeps, summed over replicas.
      reduce_dtype: in which gradients go over the replicas if an action does it; None: their own.
    """

    kind: RunKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    stored: Tree = None
    reduced: Callable[[Tree], Tree] = lambda total: total
    reduce_dtype: Any = None

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
                gradient = stored[0].reduce_over_replicas(
                    gradient, stored[0].shards, self.reduce_dtype
                )
            return total + gradient

        stored = () if self.stored is None else (self.stored,)
        return jax.tree.map(add, totals, gradients, *stored)

    def if_active(self, layer: Callable[..., tuple[Any, ...]], *passed: Any) -> tuple[Any, ...]:
        """Run the layer, or pass everything on where this rank has none here."""
        if self.active is None:
            return layer(*passed)
        return lax.cond(self.active, lambda: layer(*passed), lambda: passed)

    def beside(
        self, after: "LayerSlot | None", layer: Callable[..., tuple[Any, ...]], *passed: Any
    ) -> tuple[tuple[Any, ...], Tree]:
        """`if_active`, and the whole parameters of the layer after it (None: there is none).

        If they must be gathered, that begins when what is passed first, x or dy, is there: no more
        than two layers are ever whole.
        """
        if after is None or after.stored is None:
            return self.if_active(layer, *passed), after and after.params
        x, part = lax.optimization_barrier((passed[0], after.params))
        whole = replace(after, params=part).whole()
        return self.if_active(layer, x, *passed[1:]), whole


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
    """What F leaves: y, the rings, sums and maxima, and the losses of its layers (None: none).

    `whole`: between layers the parameters of the next one, if they have been gathered ahead.
    """

    y: jax.Array
    rings: tuple[Rings, ...]
    side: Side
    loss: jax.Array | None
    whole: Tree = None


class Gradients(NamedTuple):
    """What a gradient action changes: dx (W: nothing), rings, and the sums by layer slot.

    `observed` are maxima, by the names of the variables that layers observe. `whole` is as in
    `Made`.
    """

    dx: jax.Array
    rings: tuple[Rings, ...]
    totals: tuple[Tree, ...]
    observed: Mapping[str, jax.Array] = {}
    whole: Tree = None


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a rank computes."""

    slots: tuple[LayerSlot, ...]

    @property
    def hooks(self) -> list[Callable[..., Any] | None]:
        """`LayerKind.pair` of each layer, in F's order."""
        return [slot.kind.kind.pair for slot in self.slots]

    def forward(self, given: Given, before: Made) -> Made:
        """F of the chunk on `before.y`, which is x."""
        return in_order(self.forwards(given), before)

    def forwards(self, given: Given) -> list[Callable[[Made], Made]]:
        """The same layer by layer, each on what the one before it left."""
        around = zip((None, *self.slots), self.slots, (*self.slots[1:], None))
        return [partial(_layer_forward, given, *slots) for slots in around]

    def gradient(
        self, op: Op, given: Given, before: Gradients, kept: Callable[[int, Rings], Kept],
        *, in_turn: bool = False,
    ) -> Gradients:  # fmt: skip
        """B, W or BW on `before.dx`, which is dy; the rest as in `gradients`."""
        return in_order(self.gradients(op, given, kept, in_turn=in_turn), before)

    def last_gradient(
        self, op: Op, given: Given, before: Gradients, kept: Callable[[int, Rings], Kept],
        runs: jax.Array,
    ) -> Gradients:  # fmt: skip
        """The step's last gradient of the chunk, with its sums reduced.

        It is computed on every rank, and counts where it `runs`. The sums of a layer are reduced
        from the W of the layer before it on, and nothing waits for them.
        """
        made, last = before, len(self.slots) - 1
        for done, layer in enumerate(self.gradients(op, given, kept, in_turn=True)):
            place, had = last - done, made.totals[last - done]
            made = layer(made)
            totals = list(made.totals)
            totals[place] = jax.tree.map(partial(jnp.where, runs), totals[place], had)
            if done:
                totals[place + 1] = self.slots[place + 1].reduced(totals[place + 1])
            made = made._replace(totals=tuple(totals))
        first, *others = made.totals
        observed = jax.tree.map(partial(jnp.where, runs), made.observed, before.observed)
        return made._replace(totals=(self.slots[0].reduced(first), *others), observed=observed)

    def reduced(self, totals: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Of the sums of all layers what this device keeps, summed over replicas."""
        return tuple(slot.reduced(total) for slot, total in zip(self.slots, totals))

    def gradients(
        self, op: Op, given: Given, kept: Callable[[int, Rings], Kept], *, in_turn: bool = False
    ) -> list[Callable[[Gradients], Gradients]]:
        """B, W or BW layer by layer, from the last to the first.

        `kept` gives what it reads, by ring slot and the rings there as the op finds them. Layers
        are gathered one ahead in BW alone: W reads little of them, and in B XLA does no worse.

        `in_turn`: in BW, W of a layer is done before B of the next but one begins; else XLA on GPU
        may put all W last, to hide collectives, and hold the stash of every layer (a tenth of the
        memory with 20 layers of the 70B, tp=4, full remat).
        """
        last = len(self.slots) - 1

        def run(place: int, slot: LayerSlot, before: Gradients) -> Gradients:
            def layer(*passed: Any) -> tuple[jax.Array, Tree, Tree, Rings]:
                params = slot.whole() if before.whole is None else before.whole
                return _layer_gradient(op, slot, params, given, kept(slot.ring, passed[-1]), passed)

            after = self.slots[place - 1] if place and op is Op.BW else None
            dy, rings, totals = before.dx, list(before.rings), list(before.totals)
            passed = dy, totals[place], before.observed, rings[slot.ring]
            made, whole = slot.beside(after, layer, *passed)
            dy, totals[place], observed, rings[slot.ring] = made
            if in_turn and op is Op.BW and place < last:
                dy, totals[place + 1] = lax.optimization_barrier((dy, totals[place + 1]))
            return Gradients(dy, tuple(rings), tuple(totals), observed, whole)

        return [partial(run, place, slot) for place, slot in reversed(list(enumerate(self.slots)))]


def in_order(layers: Iterable[Callable[[Any], Any]], before: Any) -> Any:
    """What layers leave, each of which takes what the one before it left."""
    return reduce(lambda made, layer: layer(made), layers, before)


def _layer_forward(
    given: Given, earlier: LayerSlot | None, slot: LayerSlot, later: LayerSlot | None, before: Made
) -> Made:
    """F of one layer, which stands between two others of its chunk."""

    def run(x: jax.Array, ring: Rings, side: Side, loss: Any) -> tuple[jax.Array, Rings, Side, Any]:
        plan = slot.kind.rings
        context = given.context(slot, plan.before_f(ring, given.row))
        params = slot.whole() if before.whole is None else before.whole
        output, kept = slot.kind.forward(params, x, context)
        more = output.side.loss
        loss = loss if more is None else loss + more.astype(loss.dtype)
        ring = plan.after_f(ring, kept, output.state, given.row)
        return output.y, ring, add_side(side, output.side, given.row.forward_mb), loss

    x, rings, side, loss, _ = before
    rings = list(rings)
    made, whole = slot.beside(later, run, x, rings[slot.ring], side, loss)
    x, rings[slot.ring], side, loss = made
    if earlier is not None and earlier.on_host:
        # What it left has had this layer's time to be copied.
        x, rings[earlier.ring] = lax.optimization_barrier((x, rings[earlier.ring]))
    if slot.stored is not None and later is not None:
        # Else XLA begins some of its gathers only in the next layer. A BW has products
        # enough for them, and would with this wait for its collectives over tp.
        x, whole = lax.optimization_barrier((x, whole))
    return Made(x, tuple(rings), side, loss, whole)


def _layer_gradient(
    op: Op, slot: LayerSlot, params: Tree, given: Given, kept: Kept,
    before: tuple[jax.Array, Tree, Tree, Rings],
) -> tuple[jax.Array, Tree, Tree, Rings]:  # fmt: skip
    """B, W or BW of one layer: dx, the sums of its gradients, maxima, and what B and BW leave.

    `params` are whole. `before` has dy, and the sums, maxima and rings as they were.
    """
    dy, total, observed, ring = before
    if op is Op.B and slot.kind.rings.pooled:
        # All is read before anything is written to the same ring: else XLA copies it.
        kept, ring = lax.optimization_barrier((kept, ring))
    split = slot.kind.split
    context, loss = given.context(slot, kept.state), split.output.side.loss
    dloss = None if loss is None else given.dloss.astype(loss.dtype)
    if op is Op.W:
        gradients = split.backward_weight(params, context, kept.residuals.for_w, kept.stash, dloss)
        return dy, slot.added(total, gradients), observed, ring
    at_output, stash = Cotangent(dy, kept.dstate, dloss), ()
    if op is Op.BW:
        dx, gradients = split.backward(params, context, kept.residuals, at_output)
    else:
        dx, gradients, stash = split.backward_input(params, context, kept.residuals, at_output)
    ring = slot.kind.rings.after_b(ring, stash, dx.state, given.row)
    return dx.value, slot.added(total, gradients), larger(observed, dx.observed), ring
