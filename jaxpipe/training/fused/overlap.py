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
from jax.sharding import PartitionSpec

from jaxpipe.core.contract import Aux, Tree
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.fit import check_fit
from jaxpipe.core.executor.parameters import DeviceParameters
from jaxpipe.core.executor.program import reduce_aux
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.mesh import PP, REPLICA_AXES, ParamSharding, batch_spec, map_stage_stacked
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.core.schedule import Schedule, TableRow
from jaxpipe.training.fused.ticks import (
    EVERY,
    Accepts,
    StepsProgram,
    Update,
    UpdatingTicks,
    ValidState,
)  # fmt: skip


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


def run_updates(
    pipeline: Pipeline, params: Tree, moments: Tree, batch: Tree, steps: Any, update: Update,
    accepts: Accepts, variables: Tree = None,
) -> UpdateOutputs:  # fmt: skip
    """Run steps that overlap, up to the gradients of the first that is not accepted.

    Args:
      pipeline: its schedule has updates (`fuse_steps`).
      params: stage-stacked params.
      moments: optimizer state; its stage-stacked trees are sharded like `params`, other leaves
        (a count, say) are replicated.
      batch: arrays `[N * M, B, ...]`, the microbatches of N steps one after the other.
      steps: number of steps to run at most, 1..N; an int or int32 scalar.
      update: `(gradients, moments, params, accepted) -> (params, moments)`, with `accepted` a
        bool scalar, without which nothing changes. It runs on a device's shards and must
        therefore be elementwise.
      accepts: `(losses, norm, terms) -> bool`, of a step's head losses (a scalar or `[K]`),
        gradient norm and number of loss terms: whether `update` is the update of the step.
      variables: the model's variables. `next_variables` must compute the entries that a layer
        reads from these entries, and from sums and maxima of this layer.

    Returns:
      An `UpdateOutputs`; the caller makes the update of its last step.

    Raises `ValueError` where arguments do not match the schedule or mesh, as `Pipeline.step`, and
    for options that overlapping steps do not support.
    """
    check_fit(pipeline, params, batch)
    _check_options(pipeline.schedule, pipeline.execution)
    sharding, tables = pipeline.sharding, pipeline.tables
    specs, all_have = sharding.partition_specs(params), PartitionSpec()
    of_moments = map_stage_stacked(sharding.partition_specs, moments, lambda leaf: all_have)
    of_gradients = select(is_trained(sharding.param_shardings(params)), specs)
    of_steps = partial(StepsProgram, steps=pipeline.schedule.updates)
    program = pipeline.device_program(tables, params, of_steps)
    assert isinstance(program, StepsProgram)
    out_specs: list[Any] = [specs, of_moments, all_have, of_gradients, *(all_have,) * 6]
    return jax.shard_map(
        UpdatingProgram(program, update, accepts),
        mesh=pipeline.mesh,
        in_specs=(specs, of_moments, all_have, batch_spec(), all_have, PartitionSpec(None, PP)),
        out_specs=UpdateOutputs(*out_specs),
        check_vma=False,
    )(params, moments, variables, batch, jnp.int32(steps), tables.columns)


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

    program: StepsProgram
    update: Update
    accepts: Accepts

    def __call__(
        self, params: Tree, moments: Tree, variables: Tree, batch: Tree, steps: jax.Array,
        columns: TableRow,
    ) -> UpdateOutputs:  # fmt: skip
        """Run at most `steps` steps, up to the first that is not accepted."""
        program = self.program
        params, moments = self._map_embed_head(_gather_over_pp, (params, moments))
        own = DeviceParameters.gather(params, self._stored, program.execution)
        work, data, carry = program.start(own, batch, variables, None)
        self._check(work)
        ticks = UpdatingTicks(
            work, data, own, program, self._stored, self.update, self.accepts, steps,
            (carry.aux, carry.statistics),
        )  # fmt: skip
        columns = jax.tree.map(lambda column: column[:, 0], columns)

        def tick(loop: tuple) -> tuple:
            number, carry, step, state = loop
            row = jax.tree.map(lambda column: column[number], columns)
            return number + 1, *ticks.tick(carry, step, state, row)

        state = ValidState(
            params, moments, variables, jnp.int32(0),
            jnp.zeros(program.steps, jnp.float32), jnp.bool_(True),
        )  # fmt: skip
        first = jnp.int32(0), carry, ticks.first_step(carry), state
        _, carry, step, state = lax.while_loop(lambda loop: loop[-1].goes_on, tick, first)
        params, moments, gradients = self._map_embed_head(
            _scatter_from_owner,
            (state.params, state.moments, step.gradients), ticks.owned,
        )  # fmt: skip
        losses, aux_losses = lax.psum((carry.losses, carry.aux_losses), EVERY)
        return UpdateOutputs(
            params, moments, state.variables, gradients, state.updates, losses, aux_losses,
            data.counts, state.squares, reduce_aux(step.aux, (PP,)),
        )  # fmt: skip

    @property
    def _stored(self) -> Tree:
        """Shardings during the steps: embedding and head are replicated over pp."""
        shardings = self.program.shardings
        return shardings | {"embed_head": jax.tree.map(_replicated, shardings["embed_head"])}

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


def _check_options(schedule: Schedule, how: Execution) -> None:
    """Raise `ValueError` for options that steps that overlap do not support."""
    lockstep = how.lockstep
    if lockstep.vocab_parallel or how.reshard_after_forward or schedule.slices > 1:
        raise ValueError(
            f"{schedule.name} with updates={schedule.updates}: steps overlap only where ranks "
            f"have full embeddings, heads, layers and sequences, but "
            f"vocab_parallel={lockstep.vocab_parallel}, "
            f"reshard_after_forward={how.reshard_after_forward}, slices={schedule.slices}."
        )
    if how.divides_at_end:
        raise ValueError(
            f"{schedule.name} with updates={schedule.updates}: steps that overlap have no loss "
            f"scale, which compute_dtype=float16 needs: use bfloat16, or run steps in turn."
        )


def _replicated(sharding: ParamSharding) -> ParamSharding:
    """Return the same sharding, except that every pipeline rank has a copy."""
    names = tuple(tuple(axis for axis in entry if axis != PP) for entry in sharding.dim_axes)
    summed = tuple(axis for axis in sharding.param.partial_grad_axes if axis != PP)
    param = replace(sharding.param, partial_grad_axes=summed)
    return replace(sharding, dim_axes=names, param=param)


def _gather_over_pp(sharding: ParamSharding, shard: jax.Array) -> jax.Array:
    """Return this device's shard of the `_replicated` parameter, from its stored shard."""
    full = sharding.gather(shard, {PP, *REPLICA_AXES})
    return _replicated(sharding).shard(full, REPLICA_AXES)


def _scatter_from_owner(sharding: ParamSharding, shard: jax.Array, owns: jax.Array) -> jax.Array:
    """Return this device's stored shard, from the owner's shard of the `_replicated` parameter.

    `owns` is a boolean scalar, true on one pipeline rank.
    """
    full = _replicated(sharding).gather(jnp.where(owns, shard, 0), REPLICA_AXES)
    return sharding.shard(sharding.reduce_scatter(full, {PP}), REPLICA_AXES)
