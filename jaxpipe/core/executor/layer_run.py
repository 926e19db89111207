"""The layers of a run on one pipeline rank, each of them alone, and the loop over them."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.buffers import Index
from jaxpipe.core.executor.traced_kind import BufferedKind
from jaxpipe.core.mesh import DP, ParamSharding
from jaxpipe.core.mesh.flags import merge, select
from jaxpipe.core.split.halves import Halves, tie
from jaxpipe.core.split.phases import run_beside_products, run_in_phases
from jaxpipe.core.split.ports import Weights

Passed = tuple[Any, ...]
Layer = Callable[..., Passed]  # (*passed) -> passed
OfLayer = Callable[..., Passed]  # (LayerRun.at(i), params, *passed) -> passed


@dataclass(frozen=True)
class LayerRun:
    """Layers of one kind that a loop executes on a pipeline rank (`StageLayout.runs`), or one.

    Attributes:
      kind: their traced kind.
      params: parameters, `[n, ...]` for n > 1 layers, or this device's shards of them where
        `shardings` is set.
      index: indices of the layers in the model, int32 `[n]`; a scalar of one layer (`at`).
      active: whether each layer slot holds a layer on this pipeline rank, `[n]` or a scalar; None:
        all do on every rank.
      ring: index of the ring group that they use.
      first: index of the first layer in the ring group.
      row: index of one layer in the stacked gradient sums of its run; None: not stacked.
      grad_sums: shapes and dtypes of the gradient sums; None for frozen parameters.
      shardings: `ParamSharding` of every parameter with `reshard_after_forward`: every action then
        gathers a layer when it needs it, and accumulates gradient shards; None: gathered already.
      reduce: reduces the run's gradient sums over data-parallel replicas to this device's shards.
      ahead: gathered parameters of the layer that a loop runs next, which arrive before the
        gradient of the same parameter is reduced; None: nothing waits for them.
      reduce_dtype: dtype in which an action reduces gradients over replicas; None: their own.
      unroll: layers in one iteration of a loop over them.
      counts: a flag without which gradient sums stay as they are; None: it is set.
    """

    kind: BufferedKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    first: Index = 0
    row: Index | None = None
    grad_sums: Tree = None
    shardings: Tree = None
    ahead: Tree = None
    reduce: Callable[[Tree], Tree] = lambda total: total
    reduce_dtype: Any = None
    unroll: int = 1
    counts: jax.Array | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.index)

    @property
    def on_host(self) -> bool:
        """Whether the residuals of the layers are stored in host memory."""
        return self.kind.rings.on_host

    def at(self, layer: Index) -> "LayerRun":
        """Return one of the layers alone."""
        is_alone = self.layers == 1
        return replace(
            self,
            params=self.params if is_alone else buffers.read(self.params, layer),
            index=buffers.read(self.index, layer),
            active=None if self.active is None else buffers.read(self.active, layer),
            first=self.first + layer,
            row=None if is_alone else layer,
        )

    def end(self, *, backward: bool) -> "LayerRun":
        """Return the layer that an action runs first: the last one in `backward` order."""
        return self.at(self.layers - 1 if backward else 0)

    def counted_if(self, flag: jax.Array) -> "LayerRun":
        """Return the run such that its gradients count only where a flag is set.

        Elsewhere layers in a cond of their own do not run: a selection inside the cond would read
        the old sums of embedding and head beside the new ones, and XLA would copy them.
        """
        if self.active is None:
            return replace(self, counts=flag)
        return replace(self, active=self.active & flag)

    def empty_params(self) -> Tree:
        """Return zeros of the shapes of the run's gathered parameters."""
        one = jax.eval_shape(lambda: self.end(backward=False).gather_params())
        lead = () if self.layers == 1 else (self.layers,)
        return jax.tree.map(lambda like: jnp.zeros((*lead, *like.shape), like.dtype), one)

    def gather_params(self) -> Tree:
        """Return the parameters of this one layer, all-gathered where `shardings` is set."""
        if self.shardings is None:
            return self.params
        return jax.tree.map(
            lambda sharding, shard: sharding.gather_for_compute(shard), self.shardings, self.params
        )

    def add_gradients(self, totals: Tree, read: Tree, gradients: Weights) -> tuple[Tree, Tree]:
        """Return totals of the run, and of embedding and head, plus gradients of this one layer.

        Totals keep their dtypes. A None gradient adds nothing, and a frozen parameter has neither.
        With `shardings`, a gradient of a dp-sharded parameter is reduced over replicas first. With
        `counts`, only the layer's own row is selected: selecting all of a run afterwards would take
        a second accumulator.

        Args:
          totals: gradient accumulators of the run.
          read: those of embedding and head; None: the layer does not read them.
          gradients: of the layer.
        """

        def add(total: jax.Array, gradient: jax.Array | None) -> jax.Array:
            if gradient is None:
                return total
            added = total + gradient.astype(total.dtype)
            return added if self.counts is None else jnp.where(self.counts, added, total)

        def add_to_row(
            total: jax.Array, gradient: jax.Array | None, sharding: ParamSharding | None = None,
            ahead: jax.Array | None = None,
        ) -> jax.Array:  # fmt: skip
            if gradient is None:
                return total
            gradient = gradient.astype(total.dtype)
            if sharding is not None and sharding.dim_of(DP) is not None:
                if ahead is not None:
                    # An iteration ends with reductions, which no compute follows. If the gathers
                    # could end there too, XLA would start them after the last product.
                    gradient, _ = lax.optimization_barrier((gradient, ahead))
                gradient = sharding.reduce_over_replicas(
                    gradient, sharding.zero_axes, self.reduce_dtype
                )
            if self.row is None:
                return add(total, gradient)
            return buffers.write(total, add(buffers.read(total, self.row), gradient), self.row)

        of_leaf = [tree for tree in (self.shardings, self.ahead) if tree is not None]
        totals = jax.tree.map(add_to_row, totals, gradients.params, *of_leaf, is_leaf=_is_none)
        if read is None:
            return totals, None
        return totals, jax.tree.map(add, read, gradients.embed_head, is_leaf=_is_none)

    def run_if_active(self, layer: Layer, passed: Passed, halves: Halves | None = None) -> Passed:
        """Run this one layer, or return `passed` where its slot is empty on this rank.

        With `halves` a layer that may not run has phases of its own (`run_in_phases`).
        """
        run = partial(layer, *passed)
        if self.active is None:
            return run()
        return lax.cond(
            self.active, run if halves is None else partial(run_in_phases, run), lambda: passed
        )

    def gather_after(self, x: jax.Array, halves: Halves | None = None) -> tuple[jax.Array, Tree]:
        """Return x or dy of the layer that runs before this one, and this one's gathered params.

        A barrier ties the gather to x, so it cannot start before that layer does and at most two
        layers are gathered at once.
        """
        x, shards = tie(x, self.params, halves)
        return x, replace(self, params=shards).gather_params()

    def over_layers(
        self, layer: OfLayer, passed: Passed, gathered: Tree = None,
        after: "LayerRun | None" = None,
        *, backward: bool = False, prefetch: bool = False, in_time: bool = False,
        halves: Halves | None = None,
    ) -> tuple[Passed, Tree]:  # fmt: skip
        """Run `layer(one, params, *passed)`, which returns `passed` updated, on every layer.

        Several layers are one loop. With `prefetch`, where layers are gathered in every action, it
        hands on the parameters of the next layer, gathered while a layer runs; the last layer then
        stands behind the loop and gathers for `after`.

        Args:
          layer: an action on one layer; the first of `passed` is x or dy.
          passed: what the first layer gets.
          gathered: parameters of the first layer if gathered already.
          after: the layer that the action runs next; None: this is the last run.
          backward: run the last layer first.
          prefetch: gather parameters one layer ahead.
          in_time: a layer's gather must end when the layer before it does, or with the last product
            of that layer where a collective follows it (`run_beside_products`).
          halves: of what the layers run on halves, in phases; those of an iteration of a loop are
            run by `run_in_phases`. None: there are no phases.

        Returns:
          `passed` after the last layer, and the gathered parameters of `after` or None.
        """
        last, ahead = self.layers - 1, prefetch and self.shardings is not None

        def run_one(
            step: Index, passed: Passed, gathered: Tree, after: Any, *, loops: bool = False
        ) -> Any:
            one, of_next = self.at(last - step if backward else step), None
            if after is not None and after.shardings is not None:
                x, of_next = after.gather_after(passed[0], halves)
                passed = x, *passed[1:]
            if loops and one.active is None:
                one = replace(one, ahead=of_next)

            def on_params(*passed: Any) -> Passed:
                params = one.gather_params() if gathered is None else gathered
                return layer(one, params, *passed)

            run = partial(one.run_if_active, on_params, passed, halves)
            if not in_time or of_next is None:
                return run(), of_next
            if halves is None:
                return run_beside_products(run, of_next)
            passed = run()
            x, of_next = tie(passed[0], of_next, halves)
            return (x, *passed[1:]), of_next

        def run_and_gather_next(step: jax.Array, state: tuple[Passed, Tree]) -> tuple[Passed, Tree]:
            after = self.at(last - step - 1 if backward else step + 1)
            return run_one(step, *state, after, loops=True)

        def run_alone(step: jax.Array, passed: Passed) -> Passed:
            return run_one(step, passed, None, None)[0]

        if not last:
            return run_one(0, passed, gathered, after if ahead else None)
        if not ahead:
            return self._repeat(self.layers, run_alone, passed, halves), None
        if gathered is None:
            gathered = self.end(backward=backward).gather_params()
        state = passed, gathered
        passed, gathered = self._repeat(last, run_and_gather_next, state, halves)
        return run_one(last, passed, gathered, after)

    @property
    def may_reduce_in_loop(self) -> bool:
        """Whether there is a loop over the layers in which no layer is in a cond."""
        return self.layers > 1 and self.active is None

    def over_layers_and_reduce(
        self, gradient: OfLayer, passed: Passed, *args: Any, **how: Any
    ) -> tuple[Passed, Tree]:
        """Run the step's last `gradient` as `over_layers` does, and reduce the gradient sums.

        The sums, the second of `passed`, are returned with this device's shards of those that are
        reduced, for `reduce_rest`. A collective cannot begin in one iteration of a loop and end in
        another, so each layer reduces the sums of the layer before it, beside its own compute. The
        first reduces some that are not complete, and the second overwrites them. Sums whose shards
        are as large as they are need no second buffer, and are reduced after the loop.
        """
        dy, sums, *others = passed
        early, like = self._reduced_in_loop(sums), jax.eval_shape(self.reduce, sums)

        def run(layer: LayerRun, params: Tree, dy: jax.Array, both: Passed, *others: Any) -> Passed:
            assert layer.row is not None
            (sums, shards), before = both, jnp.minimum(layer.row + 1, self.layers - 1)
            # Sums are read before this layer adds its own. Otherwise XLA may copy those of all.
            dy, of_before = lax.optimization_barrier((dy, _row_of(select(early, sums), before)))
            shards = self._write_reduced(shards, of_before, before)
            dy, sums, *rest = gradient(layer, params, dy, sums, *others)
            return dy, (sums, shards), *rest

        shards = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), select(early, like))
        return self.over_layers(run, (dy, (sums, shards), *others), *args, **how)

    def reduce_rest(self, both: tuple[Tree, Tree]) -> Tree:
        """Reduce the gradient sums that `over_layers_and_reduce` has left, and return all shards.

        `both` are the sums and the shards that it returns.
        """
        sums, shards = both
        early = self._reduced_in_loop(sums)
        late = jax.tree.map(operator.not_, early)
        shards = self._write_reduced(shards, _row_of(select(early, sums), 0), 0)
        return merge(early, shards, self.reduce(select(late, sums)))

    def _reduced_in_loop(self, sums: Tree) -> Tree:
        """Return whether a loop over the layers reduces each gradient sum."""
        like = jax.eval_shape(self.reduce, sums)
        return jax.tree.map(lambda shard, of: shard.shape != of.shape, like, sums)

    def _write_reduced(self, shards: Tree, of_row: Tree, row: Index) -> Tree:
        """Return the shards of all layers, with those of one layer's sums reduced."""
        return buffers.write(shards, jax.tree.map(lambda of: of[0], self.reduce(of_row)), row)

    def _repeat(
        self, layers: int, layer: Callable[[Any, Any], Any], state: Any, halves: Halves | None
    ) -> Any:
        """Return `state` after a loop of `layer(step, state)`, with `unroll` layers per iteration.

        With `halves` an iteration is one function for `run_in_phases`: what XLA unrolls would
        wait for the last collective of every layer.
        """
        if halves is None:
            return lax.fori_loop(0, layers, layer, state, unroll=self.unroll)

        def run(layers: int, iteration: Index, state: Any) -> Any:
            def one_by_one() -> Any:
                first = iteration * self.unroll
                return reduce(lambda state, i: layer(first + i, state), range(layers), state)

            return run_in_phases(one_by_one)

        iterations, rest = divmod(layers, self.unroll)
        state = lax.fori_loop(0, iterations, partial(run, self.unroll), state)
        return run(rest, iterations, state) if rest else state


def _row_of(sums: Tree, row: Index) -> Tree:
    """Return the sums of one layer of a run, with the axis of layers."""
    return jax.tree.map(partial(lax.dynamic_slice_in_dim, start_index=row, slice_size=1), sums)


def _is_none(leaf: Any) -> bool:
    return leaf is None
