"""The program of one device: from its parameter shards and batch shard to its gradient shards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Aux, Context, StageFunctions, Tree
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.embed_head import EmbedHead
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.fingerprint import fingerprint
from jaxpipe.core.executor.first_carry import first_carry
from jaxpipe.core.executor.parameters import DeviceParameters
from jaxpipe.core.executor.reference import StepOutput, divisor, total_count
from jaxpipe.core.executor.stage import EmbedHeadFunction
from jaxpipe.core.executor.step_data import Mean, StepData
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.executor.ticks import closing_tick, early_sums, opening_tick, run_ticks
from jaxpipe.core.executor.traced_kind import BufferedKind, TracedKind
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP, StageLayout
from jaxpipe.core.mesh.flags import is_trained
from jaxpipe.core.schedule import TableRow, Tables
from jaxpipe.core.split.crossing import POLICIES, RECOMPUTED, Policy


@dataclass(frozen=True)
class DeviceProgram:
    """The step as one device runs it inside the `shard_map`: local shapes, mesh axes bound.

    Attributes:
      functions: the model.
      tables: the lowered schedule.
      execution: execution options.
      layout: which layer is in which layer slot.
      shardings: `ParamSharding` of every parameter.
    """

    functions: StageFunctions
    tables: Tables
    execution: Execution
    layout: StageLayout
    shardings: Tree

    def __call__(
        self, shards: Tree, batch: Tree, unsharded: tuple[Tree, jax.Array | None], columns: TableRow
    ) -> StepOutput:
        """Run the step; `unsharded` are variables and loss scale, or None."""
        params = DeviceParameters.gather(
            shards, self.shardings, self.execution, for_layers=self._reads_embed_head
        )
        work, step, carry = self.start(params, batch, *unsharded)
        closing = closing_tick(self.tables, self.execution)
        columns = jax.tree.map(lambda column: column[:, 0], columns)
        opening = None
        if (first := opening_tick(self.tables, self.execution)) is not None:
            opening = first, params.first_chunk(self.layout, work.kinds)
        carry = run_ticks(work, step, carry, columns, closing, opening)
        every = (PP, *REPLICA_AXES)
        losses, aux_losses = lax.psum((carry.losses, carry.aux_losses), every)
        rows = {name: lax.psum(value, PP) for name, value in carry.aux.per_example.items()}
        aux = reduce_aux(aux_of(carry), every)._replace(per_example=rows)
        outputs = jax.tree.map(lambda leaf: lax.psum(leaf, PP), carry.outputs)
        if not self.tables.has_gradients:
            return StepOutput(losses, None, aux, outputs, step.counts, aux_losses)
        sums = carry.embed_head_gradients, carry.layer_gradients, carry.read_gradients
        marks = fingerprint(sums).reshape((1,) * 5) if self.execution.fingerprints else None
        early = None if closing is None else early_sums(work, self.tables, closing)
        gradients = params.gradients(*sums, early)
        if step.unscale is not None:
            gradients = jax.tree.map(lambda gradient: gradient * step.unscale, gradients)
        return StepOutput(losses, gradients, aux, outputs, step.counts, aux_losses, marks)

    @property
    def _reads_embed_head(self) -> bool:
        return any(kind.reads for kind in self.functions.kinds_by_name.values())

    def start(
        self, params: DeviceParameters, batch: Tree, variables: Tree, loss_scale: jax.Array | None
    ) -> tuple[DeviceWork, StepData, Carry]:
        """Return the work of every tick, what no tick changes, and the carry of the first."""
        rows = jax.eval_shape(lambda batch: jax.tree.map(lambda a: a[0], batch), batch)
        x = jax.eval_shape(self.functions.embed, params.embed_head, rows)
        kinds, counts = self._kinds(params, x, rows, variables)
        step = self._step_data(params, x, rows, batch, variables, loss_scale, counts)
        chunks = params.chunks(self.layout, kinds, mirrored=self.layout.mirrored)
        gradients = params.gradient_shapes(chunks) if self.tables.has_gradients else None
        embed_head = self.embed_head(step, x, rows, params.reduce_embed_head)
        work = DeviceWork(embed_head, chunks, kinds)
        return work, step, first_carry(work, step, x, rows, gradients)

    def _kinds(
        self, params: DeviceParameters, x: Any, rows: Tree, variables: Tree
    ) -> tuple[tuple[BufferedKind, ...], dict[str, Callable[[Tree], Tree]]]:
        """Trace the layer kind of every ring group at this device's shapes.

        The second value counts the terms of the auxiliary losses of the kinds that have some.
        """
        index: Any = jax.ShapeDtypeStruct((), jnp.int32)
        context = Context(rows, index, None, variables, params.embed_head_of_layers)
        trained = is_trained(self.shardings["embed_head"])
        layout, policy, offloaded = self.layout, None, 0
        if self.tables.has_gradients:
            policy, offloaded = self.execution.policy, self.execution.offload_layers
        recomputed = RECOMPUTED if self.tables.recomputations else None
        functions, slots = self.functions.kinds_by_name, layout.slot_kinds
        runs = {slots[run.start]: (i, len(run)) for i, run in enumerate(layout.runs)}

        @cache
        def traced(name: str, policy: Policy | None) -> TracedKind:
            layer = params.layer_shapes(*runs[name])
            return TracedKind.trace(
                name, functions[name], layer, x, context, policy, trained, recomputed,
                halves=self.execution.overlap_halves,
            )  # fmt: skip

        @cache
        def with_rings(
            name: str, policy: Policy | None, layers: int, on_host: bool
        ) -> BufferedKind:
            return traced(name, policy).with_rings(self.tables, layers, on_host=on_host)

        on_host, ring_kinds = layout.first_ring_slots(offloaded), layout.ring_slot_kinds
        in_full = layout.first_ring_slots(layout.remat_layers if policy else 0)
        kinds = tuple(
            with_rings(
                ring_kinds[group.start],
                POLICIES["full"] if group.start in in_full else policy,
                len(group),
                group.start in on_host,
            )
            for group in layout.ring_groups
        )
        counts = {
            kind.name: kind.loss_counts(params.layer_shapes(*runs[kind.name]), x, context)
            for kind in {kind.name: kind for kind in kinds}.values()
            if kind.output.aux.losses
        }
        return kinds, counts

    def _step_data(
        self, params: DeviceParameters, x: Any, rows: Tree, batch: Tree, variables: Tree,
        loss_scale: jax.Array | None, loss_counts: Mapping[str, Callable[[Tree], Tree]],
    ) -> StepData:  # fmt: skip
        loss = jax.eval_shape(self.functions.head, params.embed_head, x, rows)
        names = self.functions.losses
        if loss.shape != (() if len(names) == 1 else (len(names),)):
            raise ValueError(
                f"the head returns losses of shape {loss.shape}, but `losses` names "
                f"{', '.join(names)}: return a scalar for one name, else an array of as many."
            )
        counts = self._counts(self.functions.count, batch)
        share = self._share(counts, loss.dtype)
        aux = {name: self._counts(count, batch) for name, count in loss_counts.items()}
        aux = jax.tree.map(lambda counts: self._share(counts, loss.dtype), aux)
        factor: jax.Array | int = 1
        head_seed, unscale = share, None
        if loss_scale is not None:
            factor, unscale = loss_scale.astype(share.dtype), 1 / loss_scale
            head_seed = share * factor
        elif self.execution.divides_at_end:
            # Gradients of the unnormalised loss stay in float16's range; `unscale` divides them
            # by the number of the head's terms at the end of the step.
            factor = divisor(self.total(counts, loss.dtype))
            head_seed, unscale = jnp.ones_like(factor), 1 / factor
        return StepData(
            tables=self.tables,
            execution=self.execution,
            embed_head=params.embed_head,
            embed_head_of_layers=params.embed_head_of_layers,
            batch=batch,
            variables=variables,
            head=Mean(share, head_seed),
            aux=jax.tree.map(lambda share: Mean(share, share * factor), aux),
            counts=counts,
            unscale=unscale,
        )

    def _counts(self, count: Callable[[Tree], Tree], batch: Tree) -> Tree:
        """Apply a count, or several, to every microbatch and sum it over replicas: `[M]` each."""
        return lax.psum(jax.vmap(count)(batch), REPLICA_AXES)

    def total(self, counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the total of counts `[M]`, by which losses are divided."""
        return total_count(counts, dtype)

    def _share(self, counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return one over the total of counts; 0 where the total is 0."""
        total = self.total(counts, dtype)
        return jnp.where(total > 0, 1 / divisor(total), 0)

    def embed_head(
        self, step: StepData, x: Any, rows: Tree, reduce: Callable[[Tree], Tree]
    ) -> EmbedHead:
        """Trace embedding and head at the shapes of `x` and `rows`."""
        functions, embed_head = self.functions, step.embed_head
        trained = is_trained(self.shardings["embed_head"])
        head = EmbedHeadFunction.trace(functions.head, trained, embed_head, x, rows)
        return EmbedHead(
            embed=EmbedHeadFunction.trace(functions.embed, trained, embed_head, rows),
            head=head,
            outputs=functions.outputs,
            split_if_trained=head.split(embed_head, x, rows) if self.tables.has_gradients else None,
            reduce=reduce,
        )


def aux_of(carry: Carry) -> Aux:
    """Return the sums and maxima of this device's layers; those of statistics variables over tp."""
    statistics = {name: lax.pmax(value, TP) for name, value in carry.statistics.items()}
    return Aux({}, carry.aux.sums, {**carry.aux.maxima, **statistics})


def reduce_aux(aux: Aux, axes: tuple[str, ...]) -> Aux:
    """Return sums and maxima over the devices along `axes`."""
    sums, maxima = (
        {name: reduce(value, axes) for name, value in by_name.items()}
        for reduce, by_name in ((lax.psum, aux.sums), (lax.pmax, aux.maxima))
    )
    return Aux({}, sums, maxima)
