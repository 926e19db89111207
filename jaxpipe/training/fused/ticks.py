"""Ticks of several steps, in which ranks complete and validate steps (`overlap.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Aux, Tree
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.embed_head import EmbedHead
from jaxpipe.core.executor.parameters import DeviceParameters
from jaxpipe.core.executor.program import DeviceProgram, aux_of, reduce_aux
from jaxpipe.core.executor.reference import total_count
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP, ParamSharding
from jaxpipe.core.mesh.flags import choose, merge, select
from jaxpipe.core.schedule import TableRow
from jaxpipe.core.schedule.row import StepColumns

Update = Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
Accepts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
EVERY = (PP, *REPLICA_AXES)


class StepsEmbedHead(EmbedHead):
    """Embedding and head whose first gradient of a step overwrites the embedding's sum."""

    def sums_before_embed_gradient(self, carry: Carry, row: TableRow) -> Tree:
        """Return the gradient sums, zero for the embedding before its first gradient of a step."""
        totals, is_first = carry.embed_head_gradients, _steps(row).first_embed_gradient > 0
        used = select(self.embed.used, totals)
        used = jax.tree.map(lambda leaf: jnp.where(is_first, 0, leaf), used)
        return merge(self.embed.used, used, totals)


@dataclass(frozen=True)
class StepsProgram(DeviceProgram):
    """The ticks of several steps; `steps` is their number."""

    steps: int = 1

    def total(self, counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the total of counts `[N * M]` for each of the N steps."""
        return total_count(counts.reshape(self.steps, -1), dtype)

    def embed_head(self, *arguments: Any) -> StepsEmbedHead:
        """As of `DeviceProgram`, but steps do not add up."""
        one = super().embed_head(*arguments)
        return StepsEmbedHead(one.embed, one.head, one.outputs, one.split, one.reduce)


class RankStep(NamedTuple):
    """What a rank changes on a device when it completes a step.

    Attributes:
      gradients: this device's gradient shards of the newest complete step.
      square: its contribution to their squared norm.
      embed_head, layers: parameters of the next step gathered for compute, in the compute dtype;
        layers by run.
      variables: those of the next step, in the entries of this rank's layers.
      aux: sums and maxima of this rank's layers in each step, `[N, ...]`.
      done: number of complete steps.
    """

    gradients: Tree
    square: jax.Array
    embed_head: Tree
    layers: tuple[Tree, ...]
    variables: Tree
    aux: Aux
    done: jax.Array


class ValidState(NamedTuple):
    """What all ranks change together when they validate a step.

    Attributes:
      params, moments: this device's shards of parameters and optimizer state after `updates`.
      variables: the model's variables after as many.
      updates: number of updates so far.
      squares: `[N]`, squared gradient norms.
      goes_on: whether a step follows.
    """

    params: Tree
    moments: Tree
    variables: Tree
    updates: jax.Array
    squares: jax.Array
    goes_on: jax.Array


@dataclass(frozen=True)
class UpdatingTicks:
    """Ticks with updates.

    Attributes:
      work, data, own: with the parameters of the first step.
      program, update, accepts: as in `UpdatingProgram` (`overlap.py`).
      stored: how parameters are sharded during the steps.
      steps: number of steps to run at most.
      empty: auxiliary outputs and statistics before the first microbatch of a step.
    """

    work: DeviceWork
    data: StepData
    own: DeviceParameters
    program: StepsProgram
    stored: Tree
    update: Update
    accepts: Accepts
    steps: jax.Array
    empty: tuple[Aux, Tree]

    def first_step(self, carry: Carry) -> RankStep:
        """Return the gradients, parameters and counters of a rank before its first step."""
        own, variables = self.own, self.data.variables
        like = jax.eval_shape(lambda: (self._gradients(carry), self._aux(carry)))
        gradients, aux = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), like)
        aux = jax.tree.map(lambda of: jnp.stack([of] * self.program.steps), aux)
        none = jnp.float32(0), own.embed_head, own.layers, variables, aux, jnp.int32(0)
        return RankStep(gradients, *none)

    def tick(
        self, carry: Carry, step: RankStep, state: ValidState, row: TableRow
    ) -> tuple[Carry, RankStep, ValidState]:
        """Run one tick as a row of the tables says; at its end complete and validate steps."""
        embed, embed_head = self.work.embed_head.embed, carry.embed_head_gradients
        sums = _unused(embed.used, embed_head), carry.layer_gradients
        nothing = partial(jax.tree.map, jnp.zeros_like, sums)
        steps = _steps(row)
        others, layers = lax.cond(restarts := steps.step_restart > 0, nothing, lambda: sums)
        embed_head = merge(embed.used, embed_head, others)
        aux, statistics = choose(restarts, self.empty, (carry.aux, carry.statistics))
        carry = carry._replace(
            embed_head_gradients=embed_head, layer_gradients=layers, aux=aux, statistics=statistics
        )
        work, data = self._work(step)
        carry = work.tick(data, carry, row)
        with jax.named_scope("update"):
            complete = partial(self._completed, carry, step, state)
            step = lax.cond(steps.step_complete > 0, complete, lambda: step)
        with jax.named_scope("validate"):
            validate = partial(self._validated, carry, step, state)
            state = lax.cond(steps.validate > 0, validate, lambda: state)
        return carry, step, state

    def _work(self, step: RankStep) -> tuple[DeviceWork, StepData]:
        """Return the device work and data with the parameters of this rank's current step."""
        work, data = self.work, self.data
        own = replace(self.own, embed_head=step.embed_head, layers=step.layers)
        head, aux = jax.tree.map(lambda of_steps: of_steps[step.done], (data.head, data.aux))
        chunks = own.chunks(self.program.layout, work.kinds, mirrored=False)
        data = replace(
            data, embed_head=step.embed_head, variables=step.variables, head=head, aux=aux
        )
        return replace(work, chunks=chunks), data

    def _completed(self, carry: Carry, step: RankStep, state: ValidState) -> RankStep:
        """Keep the gradients, and gather the parameters after an update that is not yet valid."""
        gradients = self._gradients(carry)
        params, _ = self.update(gradients, state.moments, state.params, jnp.bool_(True))
        own = DeviceParameters.gather(params, self.stored, self.own.execution)
        aux = self._aux(carry)
        return RankStep(
            gradients, self._square(gradients), own.embed_head, own.layers,
            self._following(state.variables, aux),
            jax.tree.map(lambda of, new: of.at[step.done].set(new), step.aux, aux), step.done + 1,
        )  # fmt: skip

    def _validated(self, carry: Carry, step: RankStep, state: ValidState) -> ValidState:
        """Make the update of the oldest step, if it is accepted and another step follows."""
        number, counts = state.updates, self.data.counts
        losses, terms = (
            of_all.reshape(self.program.steps, -1, *of_all.shape[1:])[number].sum(0)
            for of_all in (carry.losses, counts)
        )
        loss, square = lax.psum(losses, EVERY), lax.psum(step.square, (*EVERY, TP))
        aux = reduce_aux(jax.tree.map(lambda of: of[number], step.aux), (PP,))
        goes_on = self.accepts(loss, jnp.sqrt(square), terms) & (number + 1 < self.steps)
        params, moments = self.update(step.gradients, state.moments, state.params, goes_on)
        variables = self._following(state.variables, aux)
        return ValidState(
            params, moments, choose(goes_on, variables, state.variables), number + goes_on,
            state.squares.at[number].set(square), goes_on,
        )  # fmt: skip

    def _aux(self, carry: Carry) -> Aux:
        """Return sums and maxima of this rank's layers, over the replicas."""
        return reduce_aux(aux_of(carry), REPLICA_AXES)

    def _following(self, variables: Tree, aux: Aux) -> Tree:
        """Return the variables after a step."""
        following = self.program.functions.next_variables
        return variables if following is None else following(variables, aux)

    def _gradients(self, carry: Carry) -> Tree:
        """Return this device's gradient shards from its sums."""
        return self.own.gradients(carry.embed_head_gradients, carry.layer_gradients, None)

    def _square(self, gradients: Tree) -> jax.Array:
        """Return the squared norm of gradients; replicated shards count on one device only."""

        def of(stored: ParamSharding, gradient: Any, owns: jax.Array | bool = True) -> Any:
            if gradient is None:
                return None
            alike = [axis for axis in (*REPLICA_AXES, TP) if stored.dim_of(axis) is None]
            counts = sum(lax.axis_index(axis) for axis in alike) == 0
            square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
            return jnp.where(counts & owns, square, 0)

        squares = (
            jax.tree.map(of, self.stored["embed_head"], gradients["embed_head"], self.owned),
            jax.tree.map(of, self.stored["layers"], gradients["layers"]),
        )
        total: Any = sum(jax.tree.leaves(squares))
        return total

    @property
    def owned(self) -> Tree:
        """Whether this pipeline rank updates an `embed_head` leaf, by leaf.

        The last stage's rank updates the leaves that the head reads, the first stage's all others.
        """
        tables, head = self.data.tables, self.work.embed_head.head
        (first,), (last,) = tables.first_ranks, tables.last_ranks
        return jax.tree.map(lambda used: lax.axis_index(PP) == (last if used else first), head.used)


def _steps(row: TableRow) -> StepColumns:
    """Return the columns of a row that a schedule with updates has."""
    assert row.steps is not None
    return row.steps


def _unused(used: Tree, sums: Tree) -> Tree:
    """Return `sums` without the used leaves."""
    return jax.tree.map(lambda is_used, leaf: None if is_used else leaf, used, sums)
