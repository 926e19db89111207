"""F, B, W and BW of one chunk, as loops over its layers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.contract import Aux, Context
from jaxpipe.parallel import DP, ParamSharding
from jaxpipe.pipeline.kind import TracedKind, add_aux, elementwise_max, embed_head_of
from jaxpipe.pipeline.ports import Cotangent, Weights
from jaxpipe.pipeline.rings import GradientInputs, RingBuffers
from jaxpipe.schedule import Op, TableRow

Tree = Any


@dataclass(frozen=True)
class LayerSlot:
    """A layer slot of a chunk, on one pipeline rank.

    Attributes:
      kind: the traced kind of its layer.
      params: parameters of the layer, or this device's shards of them where `shardings` is set.
      index: index of the layer in the model, an int32 scalar.
      active: whether the slot holds a layer on this pipeline rank; None: it does on every rank.
      ring: index of the ring slot that it uses.
      shardings: `ParamSharding` of every parameter with `reshard_after_forward`: every action then
        gathers the layer when it needs it, and accumulates gradient shards; None: gathered already.
      reduce: reduces the layer's gradient sums over data-parallel replicas to this device's shards.
      reduce_dtype: dtype in which an action reduces gradients over replicas; None: their own.
    """

    kind: TracedKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    shardings: Tree = None
    reduce: Callable[[Tree], Tree] = lambda total: total
    reduce_dtype: Any = None

    @property
    def on_host(self) -> bool:
        """Whether the residuals of the layer are stored in host memory."""
        return self.kind.rings.on_host

    def gather_params(self) -> Tree:
        """Return the parameters of the layer, all-gathered where `shardings` is set."""
        if self.shardings is None:
            return self.params
        return jax.tree.map(
            lambda how, part: how.gather_for_compute(part), self.shardings, self.params
        )

    def add_gradients(self, totals: Tree, read: Tree, gradients: Weights) -> tuple[Tree, Tree]:
        """Return totals of the layer, and of embedding and head, plus gradients, in their dtypes.

        A None gradient adds nothing, and a frozen parameter has neither.

        With `shardings`, a gradient of a dp-sharded parameter is reduced over replicas first.
        """

        def add(total: jax.Array, gradient: jax.Array | None, *stored: ParamSharding) -> jax.Array:
            if gradient is None:
                return total
            gradient = gradient.astype(total.dtype)
            if stored and stored[0].dim_of(DP) is not None:
                gradient = stored[0].reduce_over_replicas(
                    gradient, stored[0].zero_axes, self.reduce_dtype
                )
            return total + gradient

        stored = () if self.shardings is None else (self.shardings,)
        add_all = partial(jax.tree.map, add, is_leaf=lambda total: total is None)
        totals = add_all(totals, gradients.params, *stored)
        return totals, None if read is None else add_all(read, gradients.embed_head)

    def run_if_active(self, layer: Callable[..., tuple[Any, ...]], *passed: Any) -> tuple[Any, ...]:
        """Run the layer, or return `passed` unchanged where this slot is empty on this rank."""
        if self.active is None:
            return layer(*passed)
        return lax.cond(self.active, lambda: layer(*passed), lambda: passed)

    def run_and_prefetch(
        self, after: "LayerSlot | None", layer: Callable[..., tuple[Any, ...]], *passed: Any
    ) -> tuple[tuple[Any, ...], Tree]:
        """Return `run_if_active` and the gathered parameters of the layer slot that runs `after`.

        A barrier ties the gather to the first of `passed`, x or dy, so it cannot start before this
        layer does and at most two layers are gathered at once. None where no layer runs after.
        """
        if after is None or after.shardings is None:
            return self.run_if_active(layer, *passed), after and after.params
        x, part = lax.optimization_barrier((passed[0], after.params))
        whole = replace(after, params=part).gather_params()
        return self.run_if_active(layer, x, *passed[1:]), whole


class ActionInputs(NamedTuple):
    """Inputs of an action that do not come from ring buffers.

    Attributes:
      row: the row of the tables.
      rows: the batch rows of the action's microbatch.
      variables: the model's variables.
      dloss: cotangent of the layers' auxiliary losses, a scalar.
      embed_head: parameters of embedding and head as layers read them; None: no layer does.
    """

    row: TableRow
    rows: Tree
    variables: Tree
    dloss: jax.Array
    embed_head: Tree = None

    def context(self, slot: LayerSlot, state: Tree) -> Context:
        """Return the context of the layer in a slot."""
        embed_head = embed_head_of(slot.kind.kind, self.embed_head)
        return Context(self.rows, slot.index, state, self.variables, embed_head)


class ForwardOutputs(NamedTuple):
    """Outputs of F.

    Attributes:
      y: output activation; between layers, and as the input of F, the current activation.
      rings: the ring buffers that F writes, by ring slot.
      aux: sums, maxima and per-example values so far.
      loss: sum of the auxiliary losses of the layers; None: they have none.
      next_params: between layers, the parameters of the next layer if gathered ahead.
    """

    y: jax.Array
    rings: tuple[RingBuffers, ...]
    aux: Aux
    loss: jax.Array | None
    next_params: Tree = None


class BackwardOutputs(NamedTuple):
    """Outputs of a gradient action.

    Attributes:
      dx: gradient at the input (W passes it through); as the input of B or BW, dy.
      rings: the ring buffers that the action writes, by ring slot.
      grad_sums: gradient accumulators, by layer slot.
      statistics: elementwise maxima, by name of the statistics variable.
      read_sums: gradient accumulators of embedding and head; None: no layer of the chunk reads
        them.
      next_params: as in `ForwardOutputs`.
    """

    dx: jax.Array
    rings: tuple[RingBuffers, ...]
    grad_sums: tuple[Tree, ...]
    statistics: Mapping[str, jax.Array] = {}
    read_sums: Tree = None
    next_params: Tree = None


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a pipeline rank computes."""

    slots: tuple[LayerSlot, ...]

    @property
    def reads_embed_head(self) -> bool:
        """Whether a layer reads the parameters of embedding and head."""
        return any(slot.kind.kind.reads for slot in self.slots)

    @property
    def hooks(self) -> list[Callable[..., Any] | None]:
        """`LayerKind.pair` of every layer, in the order of F."""
        return [slot.kind.kind.pair for slot in self.slots]

    def forward(self, given: ActionInputs, before: ForwardOutputs) -> ForwardOutputs:
        """Run F of the chunk on `before.y`, which is x."""
        return run_in_order(self.forward_layers(given), before)

    def forward_layers(
        self, given: ActionInputs
    ) -> list[Callable[[ForwardOutputs], ForwardOutputs]]:
        """Return F of every layer as a function of the outputs of the layer before it."""
        around = zip((None, *self.slots), self.slots, (*self.slots[1:], None))
        return [partial(_layer_forward, given, *slots) for slots in around]

    def gradient(
        self, op: Op, given: ActionInputs, before: BackwardOutputs,
        kept: Callable[[int, RingBuffers], GradientInputs],
        *, in_turn: bool = False,
    ) -> BackwardOutputs:  # fmt: skip
        """Run B, W or BW on `before.dx`, which is dy; other arguments as in `gradient_layers`."""
        return run_in_order(self.gradient_layers(op, given, kept, in_turn=in_turn), before)

    def last_gradient(
        self, op: Op, given: ActionInputs, before: BackwardOutputs,
        kept: Callable[[int, RingBuffers], GradientInputs],
        runs: jax.Array,
    ) -> BackwardOutputs:  # fmt: skip
        """Run the step's last gradient action of the chunk and reduce its gradient sums.

        Every pipeline rank computes it, and its results count only where `runs` is set. The
        gradient sums of a layer are reduced as soon as the next layer in backward order has run,
        and no later computation depends on them, so the reduction overlaps with compute.
        """
        made, last = before, len(self.slots) - 1
        for done, layer in enumerate(self.gradient_layers(op, given, kept, in_turn=True)):
            place, had = last - done, made.grad_sums[last - done]
            made = layer(made)
            totals = list(made.grad_sums)
            totals[place] = jax.tree.map(partial(jnp.where, runs), totals[place], had)
            if done:
                totals[place + 1] = self.slots[place + 1].reduce(totals[place + 1])
            made = made._replace(grad_sums=tuple(totals))
        first, *others = made.grad_sums
        observed, read = jax.tree.map(
            partial(jnp.where, runs),
            (made.statistics, made.read_sums), (before.statistics, before.read_sums),
        )  # fmt: skip
        sums = self.slots[0].reduce(first), *others
        return made._replace(grad_sums=sums, statistics=observed, read_sums=read)

    def reduce(self, totals: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Reduce the gradient sums of all layers over replicas to this device's shards."""
        return tuple(slot.reduce(total) for slot, total in zip(self.slots, totals))

    def gradient_layers(
        self,
        op: Op,
        given: ActionInputs,
        kept: Callable[[int, RingBuffers], GradientInputs],
        *,
        in_turn: bool = False,
    ) -> list[Callable[[BackwardOutputs], BackwardOutputs]]:
        """Return B, W or BW of every layer as functions, from the last layer to the first.

        Only BW gathers parameters one layer ahead: W reads few of them, and in B XLA schedules the
        gathers as well without.

        Args:
          op: B, W or BW.
          given: inputs of the action.
          kept: returns the inputs that a layer reads from ring buffers, given its ring slot and the
            ring buffers of that slot that the op writes, in their current state.
          in_turn: in BW, finish W of a layer before B of the next but one starts. Otherwise XLA on
            GPU may move every W to the end to hide collectives, and the stash of all layers stays
            live (a tenth of the memory for 20 layers of a 70B model, tp=4, full remat).
        """
        last = len(self.slots) - 1

        def run(place: int, slot: LayerSlot, before: BackwardOutputs) -> BackwardOutputs:
            def layer(*passed: Any) -> tuple[jax.Array, Tree, Tree, Tree, RingBuffers]:
                params = slot.gather_params() if before.next_params is None else before.next_params
                return _layer_gradient(op, slot, params, given, kept(slot.ring, passed[-1]), passed)

            after = self.slots[place - 1] if place and op is Op.BW else None
            dy, rings, totals = before.dx, list(before.rings), list(before.grad_sums)
            read = embed_head_of(slot.kind.kind, before.read_sums)
            passed = dy, totals[place], read, before.statistics, rings[slot.ring]
            made, whole = slot.run_and_prefetch(after, layer, *passed)
            dy, totals[place], read, observed, rings[slot.ring] = made
            read = before.read_sums if read is None else read
            if in_turn and op is Op.BW and place < last:
                of_next = embed_head_of(self.slots[place + 1].kind.kind, read)
                tied = lax.optimization_barrier((dy, totals[place + 1], of_next))
                dy, totals[place + 1], of_next = tied
                read = read if of_next is None else of_next
            return BackwardOutputs(dy, tuple(rings), tuple(totals), observed, read, whole)

        return [partial(run, place, slot) for place, slot in reversed(list(enumerate(self.slots)))]


def run_in_order(layers: Iterable[Callable[[Any], Any]], before: Any) -> Any:
    """Run layers in order, each on the output of the one before it, and return the last output."""
    return reduce(lambda made, layer: layer(made), layers, before)


def _layer_forward(
    given: ActionInputs,
    earlier: LayerSlot | None,
    slot: LayerSlot,
    later: LayerSlot | None,
    before: ForwardOutputs,
) -> ForwardOutputs:
    """Run F of one layer; `earlier` and `later` are its neighbours in the chunk, if any."""

    def run(
        x: jax.Array, ring: RingBuffers, side: Aux, loss: Any
    ) -> tuple[jax.Array, RingBuffers, Aux, Any]:
        plan = slot.kind.rings
        context = given.context(slot, plan.state_before(ring, given.row))
        params = slot.gather_params() if before.next_params is None else before.next_params
        output, kept = slot.kind.forward(params, x, context)
        more = output.aux.loss
        loss = loss if more is None else loss + more.astype(loss.dtype)
        ring = plan.write_forward(ring, kept, output.state, given.row)
        return output.y, ring, add_aux(side, output.aux, given.row.forward_mb), loss

    x, rings, side, loss, _ = before
    rings = list(rings)
    made, whole = slot.run_and_prefetch(later, run, x, rings[slot.ring], side, loss)
    x, rings[slot.ring], side, loss = made
    if earlier is not None and earlier.on_host:
        # The device-to-host copy of the earlier layer's residuals overlaps with this layer and must
        # end with it.
        x, rings[earlier.ring] = lax.optimization_barrier((x, rings[earlier.ring]))
    if slot.shardings is not None and later is not None:
        # Without this barrier XLA delays some of the prefetch gathers into the next layer. BW has
        # enough matmuls to hide them, and the barrier would make it wait for tp collectives.
        x, whole = lax.optimization_barrier((x, whole))
    return ForwardOutputs(x, tuple(rings), side, loss, whole)


def _layer_gradient(
    op: Op, slot: LayerSlot, params: Tree, given: ActionInputs, kept: GradientInputs,
    before: tuple[jax.Array, Tree, Tree, Tree, RingBuffers],
) -> tuple[jax.Array, Tree, Tree, Tree, RingBuffers]:  # fmt: skip
    """Run B, W or BW of one layer on its gathered `params`.

    Takes (in `before`) dy, gradient sums of the layer and of embedding and head (None unless it
    reads them), statistics and ring buffers, and returns dx and the others updated.
    """
    dy, total, read, observed, ring = before
    if op is Op.B and slot.kind.rings.shares_stash:
        # B reads and writes the same ring buffer. Unless all reads come first, XLA copies it.
        kept, ring = lax.optimization_barrier((kept, ring))
    split = slot.kind.split
    context, loss = given.context(slot, kept.state), split.output.aux.loss
    dloss = None if loss is None else given.dloss.astype(loss.dtype)
    if op is Op.W:
        gradients = split.backward_weight(params, context, kept.residuals.for_w, kept.stash, dloss)
        return dy, *slot.add_gradients(total, read, gradients), observed, ring
    at_output, stash = Cotangent(dy, kept.dstate, dloss), ()
    if op is Op.BW:
        dx, gradients = split.backward(params, context, kept.residuals, at_output)
    else:
        dx, gradients, stash = split.backward_input(params, context, kept.residuals, at_output)
    ring = slot.kind.rings.write_backward(ring, stash, dx.state, given.row)
    return (
        dx.value,
        *slot.add_gradients(total, read, gradients),
        elementwise_max(observed, dx.statistics),
        ring,
    )
