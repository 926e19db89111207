"""What one rank does in a step, from its parameters and its part of the batch to its gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.contract import Context, Side, StageFunctions
from jaxpipe.parallel import PP, REPLICAS, TP, StageLayout
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.ends import Ends, Mean, OwnEnds, SharedEnds, StepData
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.kind import RunKind
from jaxpipe.pipeline.parameters import RankParameters
from jaxpipe.pipeline.reference import StepOutput, total_count
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
        losses, aux_losses = lax.psum((carry.losses, carry.aux_losses), every)
        side = Side(
            None,
            {name: lax.psum(value, every) for name, value in carry.side.sums.items()},
            {name: lax.pmax(value, every) for name, value in carry.side.maxima.items()}
            | {name: lax.pmax(value, (*every, TP)) for name, value in carry.observed.items()},
            {name: lax.psum(value, PP) for name, value in carry.side.rows.items()},
        )
        outputs = jax.tree.map(lambda own: lax.psum(own, PP), carry.outputs)
        if not self.tables.trains:
            return StepOutput(losses, None, side, outputs, step.counts, aux_losses)
        gradients = own.gradients(
            carry.shared_gradients, carry.layer_gradients, reduced=closing is not None
        )
        if step.unscale is not None:
            gradients = jax.tree.map(lambda gradient: gradient * step.unscale, gradients)
        return StepOutput(losses, gradients, side, outputs, step.counts, aux_losses)

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
        loss = jax.eval_shape(self.functions.head, own.shared, x, rows)
        names, outputs = self.functions.losses, self.functions.outputs
        if loss.shape != (() if len(names) == 1 else (len(names),)):
            raise ValueError(
                f"the head returns losses of shape {loss.shape}, but `losses` names "
                f"{', '.join(names)}: return a scalar for one name, else an array of as many."
            )
        counts = self._counts(self.functions.count, batch)
        tokens = counts
        if self.functions.tokens is not None:
            tokens = self._counts(self.functions.tokens, batch)
        shares = self._share(counts, loss.dtype), self._share(tokens, loss.dtype)
        seeds, unscale = shares, None
        if loss_scale is not None:
            seeds = tuple(share * loss_scale.astype(share.dtype) for share in shares)
            unscale = 1 / loss_scale
        elif self.execution.divides_at_end:
            # At the end all gradients are divided by the number of the head's terms.
            terms = jnp.maximum(self._total(counts, loss.dtype), 1)
            seeds, unscale = (jnp.ones_like(terms), terms * shares[1]), 1 / terms
        return StepData(
            tables=self.tables,
            shared=own.shared,
            batch=batch,
            variables=variables,
            loss=loss,
            outputs=outputs and jax.eval_shape(outputs, own.shared, x, rows),
            head=Mean(shares[0], seeds[0]),
            aux=Mean(shares[1], seeds[1]),
            counts=counts,
            unscale=unscale,
            poison=self.execution.poison_bubbles,
            printer=self.execution.printer,
        )

    def _counts(self, count: Callable[[Tree], jax.Array], batch: Tree) -> jax.Array:
        """What a function counts in each microbatch, over all replicas: `[M]`."""
        return lax.psum(jax.vmap(count)(batch), REPLICAS)

    def _total(self, counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The sum of such counts `[M]`, or `[N]` of so many steps."""
        return total_count(counts.reshape(self.steps, -1) if self.steps else counts, dtype)

    def _share(self, counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """One over that; 0 where it is 0."""
        total = self._total(counts, dtype)
        return jnp.where(total > 0, 1 / jnp.maximum(total, 1), 0)

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
