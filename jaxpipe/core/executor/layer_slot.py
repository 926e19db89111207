"""A layer slot of a chunk on one pipeline rank, and the loop over the layer slots of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.traced_kind import TracedKind
from jaxpipe.core.mesh import DP, ParamSharding
from jaxpipe.core.split.ports import Weights

Tree = Any
Passed = tuple[Any, ...]
Layer = Callable[..., Passed]  # (*passed) -> passed
OfSlot = Callable[..., Passed]  # (slot, params, *passed) -> passed


@dataclass(frozen=True)
class LayerSlot:
    """A layer slot of a chunk, on one pipeline rank.

    Attributes:
      kind: the traced kind of its layer.
      params: parameters of the layer, or this device's shards of them where `shardings` is set.
      index: index of the layer in the model, an int32 scalar.
      active: whether the slot holds a layer on this pipeline rank; None: it does on every rank.
      ring: index of the ring group that it uses.
      place: index of the layer in the ring group.
      row: index of the layer in the stacked gradient sums of its run; None: not stacked.
      shardings: `ParamSharding` of every parameter with `reshard_after_forward`: every action then
        gathers the layer when it needs it, and accumulates gradient shards; None: gathered already.
      reduce_dtype: dtype in which an action reduces gradients over replicas; None: their own.
    """

    kind: TracedKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    place: int | jax.Array = 0
    row: int | jax.Array | None = None
    shardings: Tree = None
    reduce_dtype: Any = None

    def gather_params(self) -> Tree:
        """Return the parameters of the layer, all-gathered where `shardings` is set."""
        if self.shardings is None:
            return self.params
        return jax.tree.map(
            lambda how, part: how.gather_for_compute(part), self.shardings, self.params
        )

    def add_gradients(
        self, totals: Tree, read: Tree, gradients: Weights, counts: jax.Array | None = None
    ) -> tuple[Tree, Tree]:
        """Return totals of the run, and of embedding and head, plus gradients, in their dtypes.

        A None gradient adds nothing, and a frozen parameter has neither. With `shardings`, a
        gradient of a dp-sharded parameter is reduced over replicas first.

        Args:
          totals: gradient accumulators of the run.
          read: those of embedding and head; None: the layer does not read them.
          gradients: of the layer.
          counts: a flag without which the totals stay as they are; None: it is set. Only the
            layer's own row is selected: selecting all of a run afterwards would take a second
            accumulator.
        """

        def add(total: jax.Array, gradient: jax.Array | None) -> jax.Array:
            if gradient is None:
                return total
            added = total + gradient.astype(total.dtype)
            return added if counts is None else jnp.where(counts, added, total)

        def add_own(
            total: jax.Array, gradient: jax.Array | None, *stored: ParamSharding
        ) -> jax.Array:
            if gradient is None:
                return total
            gradient = gradient.astype(total.dtype)
            if stored and stored[0].dim_of(DP) is not None:
                gradient = stored[0].reduce_over_replicas(
                    gradient, stored[0].zero_axes, self.reduce_dtype
                )
            if self.row is None:
                return add(total, gradient)
            return buffers.write(total, add(buffers.read(total, self.row), gradient), self.row)

        is_frozen = lambda total: total is None  # noqa: E731
        stored = () if self.shardings is None else (self.shardings,)
        totals = jax.tree.map(add_own, totals, gradients.params, *stored, is_leaf=is_frozen)
        if read is None:
            return totals, None
        return totals, jax.tree.map(add, read, gradients.embed_head, is_leaf=is_frozen)

    def run_if_active(self, layer: Layer, passed: Passed) -> Passed:
        """Run the layer, or return `passed` unchanged where this slot is empty on this rank."""
        if self.active is None:
            return layer(*passed)
        return lax.cond(self.active, lambda: layer(*passed), lambda: passed)

    def run_and_prefetch(
        self, after: "LayerSlot | None", layer: Layer, passed: Passed
    ) -> tuple[Passed, Tree]:
        """Return `run_if_active` and the gathered parameters of the layer slot that runs `after`.

        A barrier ties the gather to the first of `passed`, x or dy, so it cannot start before this
        layer does and at most two layers are gathered at once. None where nothing is gathered.
        """
        if after is None or after.shardings is None:
            return self.run_if_active(layer, passed), None
        x, part = lax.optimization_barrier((passed[0], after.params))
        whole = replace(after, params=part).gather_params()
        return self.run_if_active(layer, (x, *passed[1:])), whole


@dataclass(frozen=True)
class LayerRun:
    """The layer slots of a run (`LayerRuns`) on one pipeline rank, n layers as `[n, ...]`.

    Attributes:
      kind, ring, shardings, reduce_dtype: as in `LayerSlot`, of all its layers.
      params: parameters, stacked over the layers if there are several.
      index: indices of the layers in the model, int32 `[n]`.
      active: whether each slot holds a layer on this pipeline rank, `[n]`; None: all do on every
        rank.
      first: index of the first layer in the ring group.
      reduce: reduces the run's gradient sums over data-parallel replicas to this device's shards.
      unroll: layers in one iteration of a loop over them.
    """

    kind: TracedKind
    params: Tree
    index: jax.Array
    active: jax.Array | None
    ring: int
    first: int = 0
    shardings: Tree = None
    reduce: Callable[[Tree], Tree] = lambda total: total
    reduce_dtype: Any = None
    unroll: int = 1

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.index)

    @property
    def on_host(self) -> bool:
        """Whether the residuals of the layers are stored in host memory."""
        return self.kind.rings.on_host

    def at(self, layer: int | jax.Array) -> LayerSlot:
        """Return the slot of one of the layers."""
        alone = self.layers == 1
        return LayerSlot(
            kind=self.kind,
            params=self.params if alone else buffers.read(self.params, layer),
            index=buffers.read(self.index, layer),
            active=None if self.active is None else buffers.read(self.active, layer),
            ring=self.ring,
            place=self.first + layer,
            row=None if alone else layer,
            shardings=self.shardings,
            reduce_dtype=self.reduce_dtype,
        )

    def end(self, *, backward: bool) -> LayerSlot:
        """Return the slot that an action runs first: the last one in `backward` order."""
        return self.at(self.layers - 1 if backward else 0)

    def over_layers(
        self, layer: OfSlot, passed: Passed, gathered: Tree = None, after: LayerSlot | None = None,
        *, backward: bool = False, prefetch: bool = False, in_time: bool = False,
    ) -> tuple[Passed, Tree]:  # fmt: skip
        """Run `layer(slot, params, *passed)`, which returns `passed` updated, on every layer.

        Several layers are one loop. With `prefetch`, where layers are gathered in every action, it
        hands on the parameters of the next layer, gathered while a layer runs; the last layer then
        stands behind the loop and gathers for `after`.

        Args:
          layer: an action on one layer; the first of `passed` is x or dy.
          passed: what the first layer gets.
          gathered: parameters of the first layer if gathered already.
          after: the layer slot that the action runs next; None: this is the last run.
          backward: run the last layer first.
          prefetch: gather parameters one layer ahead.
          in_time: a layer's gather must end when the layer before it does.

        Returns:
          `passed` after the last layer, and the gathered parameters of `after` or None.
        """
        last, ahead = self.layers - 1, prefetch and self.shardings is not None

        def one(step: int | jax.Array, passed: Passed, gathered: Tree, after: Any) -> Any:
            slot = self.at(last - step if backward else step)

            def of_slot(*passed: Any) -> Passed:
                params = slot.gather_params() if gathered is None else gathered
                return layer(slot, params, *passed)

            passed, whole = slot.run_and_prefetch(after, of_slot, passed)
            if in_time and whole is not None:
                x, whole = lax.optimization_barrier((passed[0], whole))
                passed = x, *passed[1:]
            return passed, whole

        def ahead_of(step: jax.Array, state: tuple[Passed, Tree]) -> tuple[Passed, Tree]:
            following = self.at(last - step - 1 if backward else step + 1)
            return one(step, *state, following)

        if not last:
            return one(0, passed, gathered, after if ahead else None)
        if not ahead:
            alone = lambda step, passed: one(step, passed, None, None)[0]  # noqa: E731
            return lax.fori_loop(0, self.layers, alone, passed, unroll=self.unroll), None
        if gathered is None:
            gathered = self.end(backward=backward).gather_params()
        state = passed, gathered
        passed, gathered = lax.fori_loop(0, last, ahead_of, state, unroll=self.unroll)
        return one(last, passed, gathered, after)
