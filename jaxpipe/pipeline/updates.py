"""Several steps in one program: every rank updates its stages once their gradients are complete.

The update runs in a two-way cond at the end of a tick. It reads the gradient sums and does not
write them; a cond of their own resets them in the next tick. The embedding is the exception: the
first gradient of a step overwrites its sum, since XLA on GPU would copy a sum that two conds write
if one of them adds to it by anything but a matmul. Actions read parameters from the carry.
Embedding and head, otherwise sharded over pp, are replicated on all pipeline ranks during these
steps, and the rank that computes them updates them.

An update uses gradients as they are. A caller whose update depends on all gradients (to clip by
their norm or skip non-finite ones) must keep the previous state and check the norms afterwards.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel import PP, REPLICA_AXES, TP, ParamSharding, is_stage_stacked
from jaxpipe.parallel.flags import merge
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.parameters import DeviceParameters
from jaxpipe.pipeline.program import DeviceProgram
from jaxpipe.pipeline.tick import DeviceWork
from jaxpipe.schedule import TableRow

Tree = Any
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class UpdateOutputs(NamedTuple):
    """The outputs of several steps.

    Attributes:
      params, moments: after the last update, with the structure and sharding of the inputs.
      losses: each microbatch's share of its step's loss, `[N * M]` or `[N * M, K]`.
      aux_losses: its share of the layers' auxiliary losses, `[N * M]`; None: they have none.
      counts: number of terms of the head's losses in each microbatch, `[N * M]`.
      squares: squared gradient norm of each step, float32 `[N]`.
    """

    params: Tree
    moments: Tree
    losses: jax.Array
    aux_losses: jax.Array | None
    counts: jax.Array
    squares: jax.Array


class UpdatedState(NamedTuple):
    """What an update changes on a device.

    Attributes:
      params, moments: this device's shards of parameters and optimizer state.
      embed_head, layers: parameters gathered for compute, in the compute dtype; layers by run.
      done: number of updates so far.
      squares: `[N]`, this device's contribution to the squared gradient norms.
    """

    params: Tree
    moments: Tree
    embed_head: Tree
    layers: tuple[Tree, ...]
    done: jax.Array
    squares: jax.Array


@dataclass(frozen=True)
class UpdatingProgram:
    """Several steps as one device runs them.

    Attributes:
      program: the program that runs the ticks.
      update: `(gradients, moments, params) -> (params, moments)`, elementwise since it runs on a
        device's shards of stage-stacked trees.
    """

    program: DeviceProgram
    update: Update

    def __call__(
        self, params: Tree, moments: Tree, batch: Tree, columns: TableRow
    ) -> UpdateOutputs:
        """Run all steps."""
        program = self.program
        params, moments = self._with_shared(ParamSharding.gather_over_pp, (params, moments))
        own = DeviceParameters.gather(params, self._stored, program.execution)
        work, carry = program.start(own, batch, None, None)
        self._check(work)
        squares = jnp.zeros(program.steps, jnp.float32)
        state = UpdatedState(params, moments, own.embed_head, own.layers, jnp.int32(0), squares)
        ticks = _UpdatingTicks(work, own, program, self._stored, self.update)
        columns = jax.tree.map(lambda column: column[:, 0], columns)
        (carry, state), _ = lax.scan(
            lambda both, row: (ticks.tick(*both, row), None), (carry, state), columns
        )
        stage_stacked = self._with_shared(
            ParamSharding.scatter_from_owner, (state.params, state.moments), ticks.owned
        )
        losses = lax.psum((carry.losses, carry.aux_losses), (PP, *REPLICA_AXES))
        squares = lax.psum(state.squares, (PP, *REPLICA_AXES, TP))
        return UpdateOutputs(*stage_stacked, *losses, work.step.counts, squares)

    @property
    def _stored(self) -> Tree:
        """Shardings during the steps: embedding and head are replicated over pp."""
        stored = self.program.shardings
        return stored | {
            "embed_head": jax.tree.map(lambda how: how.replicated_over_pp, stored["embed_head"])
        }

    def _with_shared(self, change: Callable[..., jax.Array], tree: Tree, *more: Tree) -> Tree:
        """Apply `change` to the `embed_head` parameters of every stage-stacked tree."""

        def of(node: Tree) -> Tree:
            if not is_stage_stacked(node):
                return node
            stored = self.program.shardings["embed_head"]
            own = lambda how, leaf, *more: None if leaf is None else change(how, leaf, *more)  # noqa: E731
            return node | {"embed_head": jax.tree.map(own, stored, node["embed_head"], *more)}

        return jax.tree.map(of, tree, is_leaf=is_stage_stacked)

    def _check(self, work: DeviceWork) -> None:
        """Raise `ValueError` where the model is not made for overlapping steps.

        They exclude variables, outputs, auxiliary outputs, and parameters of embedding and head
        that several ranks would update: tied ones, and those that layers read.
        """
        sides = [kind.output.aux for kind in work.kinds]
        beside = any(side.sums or side.maxima or side.per_example for side in sides)
        if beside or self.program.functions.variables or self.program.functions.outputs:
            raise ValueError(
                "steps that overlap leave parameters, moments and losses: use functions without "
                "variables, outputs, and sums, maxima or rows of layers, or steps in turn."
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
    """Ticks with updates; `work` and `own` contain the parameters of the first step."""

    work: DeviceWork
    own: DeviceParameters
    program: DeviceProgram
    stored: Tree
    update: Update

    def tick(self, carry: Carry, state: UpdatedState, row: TableRow) -> tuple[Carry, UpdatedState]:
        """Run one tick as a row of the tables says, with the update at its end, if any."""
        embed, shared = self.work.embed_head.embed, carry.embed_head_gradients
        sums = embed.unused(shared), carry.layer_gradients
        nothing = partial(jax.tree.map, jnp.zeros_like, sums)
        others, layers = lax.cond(row.steps.step_restart > 0, nothing, lambda: sums)
        shared = merge(embed.used, shared, others)
        carry = carry._replace(embed_head_gradients=shared, layer_gradients=layers)
        carry = self._work(state).tick(carry, row)
        with jax.named_scope("update"):
            state = lax.cond(
                row.steps.step_complete > 0, partial(self._updated, carry, state), lambda: state
            )
        return carry, state

    def _work(self, state: UpdatedState) -> DeviceWork:
        """Return the device work with the parameters of this rank's current step."""
        work, step = self.work, self.work.step
        own = replace(self.own, embed_head=state.embed_head, layers=state.layers)
        head, aux = jax.tree.map(lambda of_steps: of_steps[state.done], (step.head, step.aux))
        layout, runs = self.program.layout, self.program.runs
        chunks = own.chunks(layout, runs, work.kinds, mirrored=False)
        work = replace(work, chunks=chunks)
        return work.with_step(embed_head=state.embed_head, head=head, aux=aux)

    def _updated(self, carry: Carry, state: UpdatedState) -> UpdatedState:
        gradients = self.own.gradients(
            carry.embed_head_gradients, carry.layer_gradients, None, reduced=False
        )
        params, moments = self.update(gradients, state.moments, state.params)
        own = DeviceParameters.gather(params, self.stored, self.own.execution)
        squares = state.squares.at[state.done].add(self._square(gradients))
        return UpdatedState(params, moments, own.embed_head, own.layers, state.done + 1, squares)

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
        tables, head = self.work.step.tables, self.work.embed_head.head
        (first,), (last,) = tables.first_ranks, tables.last_ranks
        return jax.tree.map(lambda used: lax.axis_index(PP) == (last if used else first), head.used)
