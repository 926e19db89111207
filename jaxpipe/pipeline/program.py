"""What one rank does in a step, from its parameters and its part of the batch to its gradients."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.contract import Context, Side, StageFunctions
from jaxpipe.parallel import PP, REPLICAS, TP, StageLayout
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.ends import Ends, OwnEnds, SharedEnds, StepData
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.kind import RunKind
from jaxpipe.pipeline.parameters import RankParameters
from jaxpipe.pipeline.reference import StepOutput
from jaxpipe.pipeline.stage import SharedPart
from jaxpipe.pipeline.tick import RankWork
from jaxpipe.pipeline.ticks import closing_tick, run_ticks
from jaxpipe.schedule import Row, Tables

Tree = Any


@dataclass(frozen=True)
class RankProgram:
    """The whole step as one rank sees it: local shapes, the axes of the mesh bound.

    Of several `steps` in one schedule `updates.py` makes the updates; 0: of one, without.
    """

    functions: StageFunctions
    tables: Tables
    execution: Execution
    layout: StageLayout
    stored: Tree
    steps: int = 0

    def __call__(
        self, params: Tree, batch: Tree, uncut: tuple[Tree, jax.Array | None], columns: Row
    ) -> StepOutput:
        """The step on this rank; `uncut` are the variables and the loss scale, if there is one."""
        own = RankParameters.of(params, self.stored, self.execution)
        work, carry = self.begun(own, batch, *uncut)
        step, closing = work.step, closing_tick(self.tables, self.execution)
        columns = jax.tree.map(lambda column: column[:, 0], columns)
        carry = run_ticks(work, carry, columns, closing)
        every = (PP, *REPLICAS)
        losses = lax.psum(carry.losses, every)
        side = Side(
            None,
            {name: lax.psum(value, every) for name, value in carry.side.sums.items()},
            {name: lax.pmax(value, every) for name, value in carry.side.maxima.items()}
            | {name: lax.pmax(value, (*every, TP)) for name, value in carry.observed.items()},
            {name: lax.psum(value, PP) for name, value in carry.side.rows.items()},
        )
        outputs = jax.tree.map(lambda own: lax.psum(own, PP), carry.outputs)
        if not self.tables.trains:
            return StepOutput(losses, None, side, outputs)
        gradients = own.gradients(
            carry.shared_gradients, carry.layer_gradients, reduced=closing is not None
        )
        if step.unscale is not None:
            gradients = jax.tree.map(lambda gradient: gradient * step.unscale, gradients)
        return StepOutput(losses, gradients, side, outputs)

    def begun(
        self, own: RankParameters, batch: Tree, variables: Tree, loss_scale: jax.Array | None
    ) -> tuple[RankWork, Carry]:
        """What this rank does in every tick, and what it hands to the first."""
        rows = jax.eval_shape(lambda batch: jax.tree.map(lambda a: a[0], batch), batch)
        x = jax.eval_shape(self.functions.embed, own.shared, rows)
        step = self._step_data(own, x, rows, batch, variables, loss_scale)
        kinds = self._kinds(own, x, rows, variables)
        mirrored = self.layout.placement.mirrored_from is not None
        chunks = own.chunks(self.layout, kinds, mirrored=mirrored)
        work = RankWork(step, self._ends(step, x, rows), chunks, kinds)
        return work, work.first_carry(x, own.totals(chunks))

    def _kinds(
        self, own: RankParameters, x: Any, rows: Tree, variables: Tree
    ) -> tuple[RunKind, ...]:
        """The kind of every ring slot, traced at this device's shapes."""
        context = Context(rows, jax.ShapeDtypeStruct((), jnp.int32), None, variables)
        policy = self.execution.policy if self.tables.trains else None
        slots, functions = self.layout.slot_kinds, self.functions.by_name
        away = self.layout.first_rings(self.execution.offload_layers if policy else 0)

        @cache
        def traced(name: str) -> RunKind:
            layer = own.one_layer(slots.index(name))
            return RunKind.trace(name, functions[name], layer, x, context, policy)

        @cache
        def with_rings(name: str, on_host: bool) -> RunKind:
            return traced(name).with_rings(self.tables, on_host=on_host)

        return tuple(
            with_rings(name, ring in away) for ring, name in enumerate(self.layout.ring_kinds)
        )

    def _step_data(
        self, own: RankParameters, x: Any, rows: Tree, batch: Tree, variables: Tree,
        loss_scale: jax.Array | None,
    ) -> StepData:  # fmt: skip
        terms = lax.psum(self._counted(batch), REPLICAS)
        loss = jax.eval_shape(self.functions.head, own.shared, x, rows)
        names, outputs = self.functions.losses, self.functions.outputs
        if loss.shape != (() if len(names) == 1 else (len(names),)):
            raise ValueError(
                f"the head returns losses of shape {loss.shape}, but `losses` names "
                f"{', '.join(names)}: return a scalar for one name, else an array of as many."
            )
        share = jnp.where(terms > 0, 1 / jnp.maximum(terms, 1).astype(loss.dtype), 0)
        seed, unscale = share, None
        if loss_scale is not None:
            seed, unscale = share * loss_scale.astype(share.dtype), 1 / loss_scale
        elif self.execution.divides_at_end:
            seed, unscale = jnp.ones_like(share), share
        return StepData(
            tables=self.tables,
            shared=own.shared,
            batch=batch,
            variables=variables,
            loss=loss,
            outputs=outputs and jax.eval_shape(outputs, own.shared, x, rows),
            share=share,
            seed=seed,
            unscale=unscale,
            poison=self.execution.poison_bubbles,
            printer=self.execution.printer,
        )

    def _counted(self, batch: Tree) -> jax.Array:
        """The terms of the step's loss in this device's rows, or `[N]` of so many steps."""
        counts = jax.vmap(self.functions.count)(batch)
        return counts.reshape(self.steps, -1).sum(axis=1) if self.steps else counts.sum()

    def _ends(self, step: StepData, x: Any, rows: Tree) -> Ends:
        """Embedding and head, traced at the shapes of `x` and `rows`."""
        functions, shared = self.functions, step.shared
        head = SharedPart.trace(functions.head, shared, x, rows)
        return (SharedEnds if self.tables.lockstep.vocab_parallel else OwnEnds)(
            functions=functions,
            embed=SharedPart.trace(functions.embed, shared, rows),
            head=head,
            split=head.split(shared, x, rows) if self.tables.trains else None,
            step=step,
        )
