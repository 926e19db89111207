"""Several steps in one program: every rank updates its stages once their gradients are complete.

The update runs in a two-way cond at the end of a tick. It reads the gradient sums and does not
write them; a cond of their own resets them in the next tick. The embedding is the exception: the
first gradient of a step overwrites its sum, since XLA on GPU would copy a sum that two conds write
if one of them adds to it by anything but a matmul. Actions read parameters from the carry.
Embedding and head, otherwise sharded over pp, are replicated on all pipeline ranks during these
steps, and the rank that computes them updates them.

A rank does not wait for the others: it goes on with the parameters that its gradients give as they
are, and keeps both the gradients and the state before the update. Once all ranks have completed the
step, in a tick that the tables give, they exchange its squared gradient norm and loss. If the
caller accepts these, all ranks make the update. Otherwise the loop ends, and the gradients are
returned with the state before the update: what ranks have computed of the next step is lost, and no
other step (post-validation: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 4; its
ranks hand partial norms on, because they share no ticks).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Aux, Tree
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.parameters import DeviceParameters
from jaxpipe.core.executor.program import DeviceProgram, aux_of, reduce_aux
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP, ParamSharding, map_stage_stacked
from jaxpipe.core.mesh.flags import choose, merge
from jaxpipe.core.schedule import TableRow

Update = Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
Accepts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_EVERY = (PP, *REPLICA_AXES)


class UpdateOutputs(NamedTuple):
    """The outputs of several steps, up to the gradients of the last.

    Attributes:
      params, moments, variables: before the update of the last step, with the structure and
        sharding of the inputs.
      gradients: of the last step, with the structure and sharding of `params`; None for frozen
        parameters.
      updates: number of updates, int32; the number of the last step, counted from 0.
      losses: each microbatch's share of its step's loss, `[N * M]` or `[N * M, K]`.
      aux_losses: its share of the layers' auxiliary losses, `[N * M]`; None: they have none.
      counts: number of terms of the head's losses in each microbatch, `[N * M]`.
      squares: squared gradient norm of each step, float32 `[N]`.
      aux: layers' sums and maxima of each step, `[N, ...]`; steps after the last are incomplete.
    """

    params: Tree
    moments: Tree
    variables: Tree
    gradients: Tree
    updates: jax.Array
    losses: jax.Array
    aux_losses: jax.Array | None
    counts: jax.Array
    squares: jax.Array
    aux: Aux


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
class UpdatingProgram:
    """Several steps as one device runs them.

    Attributes:
      program: the program that runs the ticks.
      update: `(gradients, moments, params, accepted) -> (params, moments)`, elementwise since it
        runs on a device's shards of stage-stacked trees; unchanged unless the flag `accepted` is
        true.
      accepts: `(loss, norm, terms) -> flag`: whether the update of a step is `update`, from its
        losses, gradient norm and number of loss terms.
    """

    program: DeviceProgram
    update: Update
    accepts: Accepts

    def __call__(
        self, params: Tree, moments: Tree, variables: Tree, batch: Tree, steps: jax.Array,
        columns: TableRow,
    ) -> UpdateOutputs:  # fmt: skip
        """Run at most `steps` steps, up to the first that is not accepted."""
        program = self.program
        params, moments = self._map_embed_head(ParamSharding.gather_over_pp, (params, moments))
        own = DeviceParameters.gather(params, self._stored, program.execution)
        work, data, carry = program.start(own, batch, variables, None)
        self._check(work)
        ticks = _UpdatingTicks(
            work, data, own, program, self._stored, self.update, self.accepts, steps,
            (carry.aux, carry.statistics),
        )  # fmt: skip
        columns = jax.tree.map(lambda column: column[:, 0], columns)

        def tick(loop: tuple) -> tuple:
            number, *states = loop
            row = jax.tree.map(lambda column: column[number], columns)
            return number + 1, *ticks.tick(*states, row)

        state = ValidState(
            params, moments, variables, jnp.int32(0),
            jnp.zeros(program.steps, jnp.float32), jnp.bool_(True),
        )  # fmt: skip
        first = jnp.int32(0), carry, ticks.first_step(carry), state
        _, carry, step, state = lax.while_loop(lambda loop: loop[-1].goes_on, tick, first)
        params, moments, gradients = self._map_embed_head(
            ParamSharding.scatter_from_owner,
            (state.params, state.moments, step.gradients), ticks.owned,
        )  # fmt: skip
        losses = lax.psum((carry.losses, carry.aux_losses), _EVERY)
        return UpdateOutputs(
            params, moments, state.variables, gradients, state.updates, *losses,
            data.counts, state.squares, reduce_aux(step.aux, (PP,)),
        )  # fmt: skip

    @property
    def _stored(self) -> Tree:
        """Shardings during the steps: embedding and head are replicated over pp."""
        stored = self.program.shardings
        return stored | {
            "embed_head": jax.tree.map(lambda how: how.replicated_over_pp, stored["embed_head"])
        }

    def _map_embed_head(self, change: Callable[..., jax.Array], tree: Tree, *more: Tree) -> Tree:
        """Apply `change` to the `embed_head` parameters of every stage-stacked tree."""

        def own(how: ParamSharding, leaf: Tree, *more: jax.Array) -> Tree:
            return jax.tree.map(lambda array: change(how, array, *more), leaf)  # or there is none

        def of(node: Tree) -> Tree:
            stored = self.program.shardings["embed_head"]
            return node | {"embed_head": jax.tree.map(own, stored, node["embed_head"], *more)}

        return map_stage_stacked(of, tree)

    def _check(self, work: DeviceWork) -> None:
        """Raise `ValueError` where the model is not made for overlapping steps.

        They exclude outputs, and parameters of embedding and head that several ranks would update:
        tied ones, and those that layers read.
        """
        rows = any(kind.output.aux.per_example for kind in work.kinds)
        if rows or self.program.functions.outputs:
            raise ValueError(
                "steps that overlap return nothing by microbatch but losses: use functions without "
                "outputs, and layers without `Aux.per_example`, or run steps in turn."
            )
        if any(chunk.reads_embed_head for chunk in work.chunks):
            raise ValueError(
                "layers read the parameters of embedding and head (LayerKind.reads), and several "
                "ranks would update them: run steps in turn."
            )
        used = work.embed_head.embed.used, work.embed_head.head.used
        if any(jax.tree.leaves(jax.tree.map(operator.and_, *used))):
            raise ValueError(
                "embedding and head read the same leaf, and two ranks would update it: untie them, "
                "or run steps in turn."
            )


@dataclass(frozen=True)
class _UpdatingTicks:
    """Ticks with updates.

    Attributes:
      work, data, own: with the parameters of the first step.
      program, stored, update, accepts: as in `UpdatingProgram`; how parameters are sharded.
      steps: number of steps to run at most.
      empty: auxiliary outputs and statistics before the first microbatch of a step.
    """

    work: DeviceWork
    data: StepData
    own: DeviceParameters
    program: DeviceProgram
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
        sums = embed.unused(embed_head), carry.layer_gradients
        nothing = partial(jax.tree.map, jnp.zeros_like, sums)
        others, layers = lax.cond(restarts := row.steps.step_restart > 0, nothing, lambda: sums)
        embed_head = merge(embed.used, embed_head, others)
        aux, statistics = choose(restarts, self.empty, (carry.aux, carry.statistics))
        carry = carry._replace(
            embed_head_gradients=embed_head, layer_gradients=layers, aux=aux, statistics=statistics
        )
        work, data = self._work(step)
        carry = work.tick(data, carry, row)
        with jax.named_scope("update"):
            complete = partial(self._completed, carry, step, state)
            step = lax.cond(row.steps.step_complete > 0, complete, lambda: step)
        with jax.named_scope("validate"):
            validate = partial(self._validated, carry, step, state)
            state = lax.cond(row.steps.validate > 0, validate, lambda: state)
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
        loss, square = lax.psum(losses, _EVERY), lax.psum(step.square, (*_EVERY, TP))
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
        return self.own.gradients(
            carry.embed_head_gradients, carry.layer_gradients, None, reduced=False
        )

    def _square(self, gradients: Tree) -> jax.Array:
        """Return the squared norm of gradients; replicated shards count on one device only."""

        def of(stored: ParamSharding, gradient: Any, owns: jax.Array = True) -> Any:
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
        return sum(jax.tree.leaves(squares))

    @property
    def owned(self) -> Tree:
        """Whether this pipeline rank updates an `embed_head` leaf, by leaf.

        The last stage's rank updates the leaves that the head reads, the first stage's all others.
        """
        tables, head = self.data.tables, self.work.embed_head.head
        (first,), (last,) = tables.first_ranks, tables.last_ranks
        return jax.tree.map(lambda used: lax.axis_index(PP) == (last if used else first), head.used)
