"""F, R, B, W and BW of one chunk, as loops over its layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Aux, Tree
from jaxpipe.core.contract.layer import Pair
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.action_values import ActionInputs, BackwardOutputs, ForwardOutputs
from jaxpipe.core.executor.layer_run import LayerRun, Passed
from jaxpipe.core.executor.ring_buffers import GradientInputs, RingArrays
from jaxpipe.core.executor.traced_kind import add_aux, elementwise_max, embed_head_of
from jaxpipe.core.schedule import Op
from jaxpipe.core.split.halves import tie
from jaxpipe.core.split.ports import Cotangent

ReadInputs = Callable[[LayerRun, RingArrays], GradientInputs]


@dataclass(frozen=True)
class Chunk:
    """The layers of one of the stages that a pipeline rank computes, in runs."""

    runs: tuple[LayerRun, ...]

    @property
    def reads_embed_head(self) -> bool:
        """Whether a layer reads the parameters of embedding and head."""
        return any(run.kind.kind.reads for run in self.runs)

    @property
    def pairs(self) -> list[Pair | None]:
        """`LayerKind.pair` of the layers of every run, in the order of F."""
        return [run.kind.kind.pair for run in self.runs]

    def forward(self, inputs: ActionInputs, before: ForwardOutputs) -> ForwardOutputs:
        """Run F of the chunk on `before.y`, which is x."""
        return run_in_order(self.forward_runs(inputs), before)

    def first_forward(self, inputs: ActionInputs, before: ForwardOutputs) -> ForwardOutputs:
        """Run F on layers whose parameters are still shards; return them gathered, too."""
        return run_in_order(self.forward_runs(inputs, collects=True), before)

    def forward_runs(
        self, inputs: ActionInputs, *, collects: bool = False
    ) -> list[Callable[[ForwardOutputs], ForwardOutputs]]:
        """Return F of every run as a function of the outputs of the run before it.

        `collects`: whether the outputs have the parameters that F gathers.
        """
        around = zip((None, *self.runs), self.runs, (*self.runs[1:], None))
        return [partial(_run_forward, inputs, *runs, collects) for runs in around]

    def recompute(
        self, inputs: ActionInputs, slot: jax.Array, rings: tuple[RingArrays, ...]
    ) -> tuple[RingArrays, ...]:
        """Run R on what F stored in a slot; return the ring buffers with the residuals."""

        def recompute(layer: LayerRun, params: Tree, ring: RingArrays) -> tuple[RingArrays]:
            kind, its_rings = layer.kind, layer.kind.rings
            # R reads and writes the same ring buffers: see `_layer_gradient`.
            stored = its_rings.read_for_r(ring, slot, layer.first)
            stored, ring = lax.optimization_barrier((stored, ring))
            residuals = kind.split.recompute(params, inputs.context(layer, None), stored)
            return (its_rings.write_residuals(ring, residuals, inputs.row, layer.first),)

        new, gathered = list(rings), None
        for run, later in zip(self.runs, (*self.runs[1:], None)):
            after = later and later.end(backward=False)
            (new[run.ring],), gathered = run.over_layers(
                recompute, (new[run.ring],), gathered, after, prefetch=True
            )
        return tuple(new)

    def gradient(
        self, op: Op, inputs: ActionInputs, before: BackwardOutputs, read_inputs: ReadInputs,
        *, in_turn: bool = False,
    ) -> BackwardOutputs:  # fmt: skip
        """Run B, W or BW on `before.dx`, which is dy; other arguments as in `gradient_runs`."""
        return run_in_order(self.gradient_runs(op, inputs, read_inputs, in_turn=in_turn), before)

    def last_gradient(
        self,
        op: Op,
        inputs: ActionInputs,
        before: BackwardOutputs,
        read_inputs: ReadInputs,
        runs: jax.Array,
        reduced: Tree,
    ) -> tuple[BackwardOutputs, Tree]:
        """Run the step's last gradient action of the chunk and reduce its gradient sums.

        Every pipeline rank computes it, and its results count only where the flag `runs` is set;
        layers in a cond (`LayerRun.active`) run only there.
        The gradient sums of a run are reduced as soon as the next run in backward order is
        finished, and no later computation depends on them, so the reduction overlaps with compute.
        A loop over layers reduces those of a layer itself, while it computes the next.

        `reduced` are reductions that wait for nothing here. They end before what follows the last
        run: XLA's scheduler goes backwards, and begins reductions that may end later behind the
        last product.

        Returns:
          outputs of the action, and `reduced`.
        """
        counted = Chunk(tuple(run.counted_if(runs) for run in self.runs))
        actions = counted.gradient_runs(op, inputs, read_inputs, in_turn=True, reduces=True)
        outputs = actions[0](before)
        for place, action in zip(reversed(range(1, len(self.runs))), actions[1:]):
            outputs = action(outputs)  # of the run before `place`
            outputs = outputs._replace(grad_sums=self._with_reduced(outputs.grad_sums, place))
        statistics = jax.tree.map(partial(jnp.where, runs), outputs.statistics, before.statistics)
        dx, reduced = lax.optimization_barrier((outputs.dx, reduced))
        first, *others = outputs.grad_sums
        if self.runs[0].may_reduce_in_loop:
            first, reduced = lax.optimization_barrier((first, reduced))
        grad_sums = self._with_reduced((first, *others), 0)
        return outputs._replace(dx=dx, grad_sums=grad_sums, statistics=statistics), reduced

    def _with_reduced(self, totals: tuple[Tree, ...], place: int) -> tuple[Tree, ...]:
        """Return the gradient sums of all runs, with those of one run reduced over replicas."""
        run = self.runs[place]
        reduced = (run.reduce_rest if run.may_reduce_in_loop else run.reduce)(totals[place])
        return (*totals[:place], reduced, *totals[place + 1 :])

    def reduce(self, totals: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Reduce the gradient sums of all layers over replicas to this device's shards."""
        return tuple(run.reduce(total) for run, total in zip(self.runs, totals))

    def gradient_runs(
        self, op: Op, inputs: ActionInputs, read_inputs: ReadInputs,
        *, in_turn: bool = False, reduces: bool = False,
    ) -> list[Callable[[BackwardOutputs], BackwardOutputs]]:  # fmt: skip
        """Return B, W or BW of every run as functions, from the last run to the first.

        Only BW gathers parameters one layer ahead: W reads few of them, and in B XLA schedules the
        gathers as well without.

        Args:
          op: B, W or BW.
          inputs: inputs of the action.
          read_inputs: returns the inputs that a layer reads from ring buffers, given the layer and
            the arrays of its ring group that the op writes, in their current state.
          in_turn: read the residuals of a run once its dy is known, or, if the layers have
            collectives, once the run before it starts, beside which XLA hides them; finish W of a
            run (in BW) or write its W stash (in B) before B of the next but one starts. Otherwise
            XLA on GPU may first recompute all layers, or move every W or write to the end, and what
            that computes stays live (a third of the memory for 20 layers of a 13B model, tp=4, full
            remat). Residuals on the host are read without waiting, so that copies overlap.
          reduces: loops over layers reduce the gradient sums over replicas, where they can.
        """
        last = len(self.runs) - 1

        def run(place: int, run: LayerRun, before: BackwardOutputs) -> BackwardOutputs:
            def gradient(layer: LayerRun, params: Tree, *passed: Any) -> tuple[Any, ...]:
                if before.next_start is not None:
                    layer = replace(layer, first=layer.first + before.next_start)
                from_rings = read_inputs(layer, passed[-1])
                return _layer_gradient(op, layer, params, inputs, from_rings, passed)

            after = self.runs[place - 1].end(backward=True) if place else None
            dy, rings, totals = before.dx, list(before.rings), list(before.grad_sums)
            next_waits = in_turn and place and not self.runs[place - 1].on_host
            early, start = run.kind.split.has_collectives, None
            if next_waits and early:
                dy, start = lax.optimization_barrier((dy, jnp.int32(0)))
            read_sums = embed_head_of(run.kind.kind, before.read_sums)
            passed = dy, totals[place], read_sums, before.statistics, rings[run.ring]
            loops = reduces and run.may_reduce_in_loop
            over_layers: Callable[..., tuple[Passed, Tree]] = (
                run.over_layers_and_reduce if loops else run.over_layers
            )
            passed, gathered = over_layers(
                gradient, passed, before.next_params, after, backward=True, prefetch=op is Op.BW
            )
            dy, totals[place], read_sums, statistics, rings[run.ring] = passed
            if next_waits and not early:
                dy, start = lax.optimization_barrier((dy, jnp.int32(0)))
            read_sums = before.read_sums if read_sums is None else read_sums
            if in_turn and op is not Op.W and place < last:
                later = self.runs[place + 1]
                ring, of_last = later.ring, embed_head_of(later.kind.kind, read_sums)
                dy, totals[place + 1], of_last, rings[ring] = lax.optimization_barrier(
                    (dy, totals[place + 1], of_last, rings[ring])
                )
                read_sums = read_sums if of_last is None else of_last
            return BackwardOutputs(
                dy, tuple(rings), tuple(totals), statistics, read_sums, gathered, start
            )

        return [partial(run, place, of) for place, of in reversed(list(enumerate(self.runs)))]


def run_in_order(runs: Iterable[Callable[[Any], Any]], before: Any) -> Any:
    """Run functions in order, each on the output of the one before; return the last output."""
    return reduce(lambda outputs, run: run(outputs), runs, before)


def _run_forward(
    inputs: ActionInputs,
    earlier: LayerRun | None,
    run: LayerRun,
    later: LayerRun | None,
    collects: bool,
    before: ForwardOutputs,
) -> ForwardOutputs:
    """Run F of a run of layers; `earlier` and `later` are its neighbours in the chunk, if any."""

    def forward(
        layer: LayerRun, params: Tree, x: jax.Array, ring: RingArrays, aux: Aux, loss: Any,
        collected: Tree,
    ) -> tuple[jax.Array, RingArrays, Aux, Any, Tree]:  # fmt: skip
        kind, rings = layer.kind, layer.kind.rings
        context = inputs.context(layer, rings.state_before(ring, inputs.row, layer.first))
        output, residuals = kind.forward(params, x, context)
        for name, total in output.aux.loss_sums.items():
            loss += (total * inputs.means[kind.name][name].share).astype(loss.dtype)
        ring = rings.write_forward(ring, residuals, output.state, inputs.row, layer.first)
        if collects:
            collected = params if layer.row is None else buffers.write(collected, params, layer.row)
        aux = add_aux(aux, output.aux, inputs.row.forward_mb)
        return output.y, ring, aux, loss, collected

    x, aux, loss, gathered = before.y, before.aux, before.loss, before.next_params
    rings, after = list(before.rings), later and later.end(backward=False)
    # The gather of a layer must end with the layer before it: otherwise XLA delays some into the
    # layer itself. BW has enough matmuls to hide them, and would wait for tp collectives.
    collected = run.empty_params() if collects else None
    passed, gathered = run.over_layers(
        forward, (x, rings[run.ring], aux, loss, collected), gathered, after,
        prefetch=True, in_time=True, halves=run.kind.halves,
    )  # fmt: skip
    x, rings[run.ring], aux, loss, collected = passed
    if earlier is not None:
        # The residuals of the earlier run are written while this one runs, and no later: otherwise
        # XLA on GPU writes them when the action ends, and holds those of all its layers till then.
        x, rings[earlier.ring] = tie(x, rings[earlier.ring], run.kind.halves)
    params = (*before.params, collected) if collects else ()
    return ForwardOutputs(x, tuple(rings), aux, loss, gathered, params)


def _layer_gradient(
    op: Op, layer: LayerRun, params: Tree, inputs: ActionInputs, from_rings: GradientInputs,
    before: tuple[jax.Array, Tree, Tree, Tree, RingArrays],
) -> tuple[jax.Array, Tree, Tree, Tree, RingArrays]:  # fmt: skip
    """Run B, W or BW of one layer on its gathered `params`.

    Takes (in `before`) dy, gradient sums of the run and of embedding and head (None unless it
    reads them), statistics and ring buffers, and returns dx and the others updated.
    """
    dy, total, read_sums, statistics, ring = before
    if op is Op.B and layer.kind.rings.shares_stash:
        # B reads and writes the same ring buffer. Unless all reads come first, XLA copies it.
        from_rings, ring = lax.optimization_barrier((from_rings, ring))
    split = layer.kind.split
    context, losses = inputs.context(layer, from_rings.state), split.output.aux.loss_sums
    dlosses = {
        name: inputs.means[layer.kind.name][name].seed.astype(like.dtype)
        for name, like in losses.items()
    }
    if op is Op.W:
        gradients = split.backward_weight(
            params, context, from_rings.residuals.for_w, from_rings.stash, dlosses
        )
        return dy, *layer.add_gradients(total, read_sums, gradients), statistics, ring
    at_output = Cotangent(dy, from_rings.dstate, dlosses)
    stash: tuple[jax.Array, ...] = ()
    if op is Op.BW:
        dx, gradients = split.backward(params, context, from_rings.residuals, at_output)
    else:
        dx, gradients, stash = split.backward_input(
            params, context, from_rings.residuals, at_output
        )
    ring = layer.kind.rings.write_backward(ring, stash, dx.state, inputs.row, layer.first)
    return (
        dx.value,
        *layer.add_gradients(total, read_sums, gradients),
        elementwise_max(statistics, dx.statistics),
        ring,
    )
