"""Several steps in one program: every rank updates what it holds when its gradients are whole.

A tick with an update ends with it, in a two-way cond. It reads the sums of gradients and does not
write them: they begin anew in the next tick, in a cond of their own. Only the embedding's does not:
its first gradient of a step takes the place of what is left there, since XLA for GPUs would copy a
sum that two conds write, if one adds to it by no product. What ops read of parameters comes from
the carry. Embedding, head and the like, which are else cut over the ranks, are for these steps
whole on each, and the rank that computes them updates them.

An update is that of gradients as they are. Whoever needs one that depends on all of them (clipped
by their norm, left out where they are not finite) keeps the state before, and looks at the norms
afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel import PP, REPLICAS, TP, StageLayout, Stored, is_stage_form
from jaxpipe.pipeline.carry import Carry
from jaxpipe.pipeline.parameters import RankParameters
from jaxpipe.pipeline.program import RankProgram
from jaxpipe.pipeline.tick import RankWork
from jaxpipe.schedule import Row

Tree = Any
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class Updated(NamedTuple):
    """What several steps leave.

    Attributes:
      params, moments: after the last update, in the form and sharding that they came in.
      losses: each microbatch's share of its step's loss, `[N M]` or `[N M, K]`.
      aux_losses: and of the losses that layers make, `[N M]`; None: they make none.
      counts: the terms of the head's losses in each microbatch, `[N M]`.
      squares: the squared norm of each step's gradients, float32 `[N]`.
    """

    params: Tree
    moments: Tree
    losses: jax.Array
    aux_losses: jax.Array | None
    counts: jax.Array
    squares: jax.Array


class Held(NamedTuple):
    """What an update changes on a rank.

    `params` and `moments` are its parts of what outlives a step; `shared` and `layers` are what ops
    read of the parameters. `done`: how many steps; `squares` `[N]`: the squared norms of what this
    device counts of their gradients.
    """

    params: Tree
    moments: Tree
    shared: Tree
    layers: tuple[Tree, ...]
    done: jax.Array
    squares: jax.Array


@dataclass(frozen=True)
class UpdatingProgram:
    """The steps as one rank sees them; `program` is that of their ticks.

    `update` is `(gradients, moments, params) -> (params, moments)`, of trees in stage form of which
    a device has parts: so it must go value by value.
    """

    program: RankProgram
    update: Update

    def __call__(self, params: Tree, moments: Tree, batch: Tree, columns: Row) -> Updated:
        """All steps on this rank."""
        program = self.program
        params, moments = self._with_shared(Stored.to_each_rank, (params, moments))
        own = RankParameters.of(params, self._stored, program.execution)
        work, carry = program.begun(own, batch, None, None)
        self._check(work)
        squares = jnp.zeros(program.steps, jnp.float32)
        held = Held(params, moments, own.shared, own.layers, jnp.int32(0), squares)
        ticks = _UpdatingTicks(work, own, program.layout, self._stored, self.update)
        columns = jax.tree.map(lambda column: column[:, 0], columns)
        (carry, held), _ = lax.scan(
            lambda state, row: (ticks.tick(*state, row), None), (carry, held), columns
        )
        made = self._with_shared(Stored.of_owner, (held.params, held.moments), ticks.owned)
        losses = lax.psum((carry.losses, carry.aux_losses), (PP, *REPLICAS))
        squares = lax.psum(held.squares, (PP, *REPLICAS, TP))
        return Updated(*made, *losses, work.step.counts, squares)

    @property
    def _stored(self) -> Tree:
        """How leaves are stored while the steps last."""
        stored = self.program.stored
        return stored | {"shared": jax.tree.map(lambda how: how.on_each_rank, stored["shared"])}

    def _with_shared(self, change: Callable[..., jax.Array], tree: Tree, *more: Tree) -> Tree:
        """With what no layer has changed, in every tree in stage form."""

        def of(node: Tree) -> Tree:
            if not is_stage_form(node):
                return node
            stored = self.program.stored["shared"]
            return node | {"shared": jax.tree.map(change, stored, node["shared"], *more)}

        return jax.tree.map(of, tree, is_leaf=is_stage_form)

    def _check(self, work: RankWork) -> None:
        """Raise `ValueError` for what outlives a step and no update changes, and for tied ends."""
        sides = [kind.output.side for kind in work.kinds]
        beside = any(side.sums or side.maxima or side.rows for side in sides)
        if beside or self.program.functions.variables or self.program.functions.outputs:
            raise ValueError(
                "steps that overlap leave parameters, moments and losses: use functions without "
                "variables, outputs, and sums, maxima or rows of layers, or steps in turn."
            )
        if set(work.ends.embed.used) & set(work.ends.head.used):
            raise ValueError(
                "embedding and head read the same leaf, and two ranks would update it: untie them, "
                "or run steps in turn."
            )


@dataclass(frozen=True)
class _UpdatingTicks:
    """Ticks with updates; `work` and `own` have the first step's parameters."""

    work: RankWork
    own: RankParameters
    layout: StageLayout
    stored: Tree
    update: Update

    def tick(self, carry: Carry, held: Held, row: Row) -> tuple[Carry, Held]:
        """Run one row of the tables."""
        embed, shared = self.work.ends.embed, carry.shared_gradients
        sums = embed.unused(shared), carry.layer_gradients
        nothing = partial(jax.tree.map, jnp.zeros_like, sums)
        others, layers = lax.cond(row.steps.begins > 0, nothing, lambda: sums)
        shared = embed.with_unused(shared, others)
        carry = carry._replace(shared_gradients=shared, layer_gradients=layers)
        carry = self._work(held).tick(carry, row)
        with jax.named_scope("update"):
            held = lax.cond(row.steps.ends > 0, partial(self._updated, carry, held), lambda: held)
        return carry, held

    def _work(self, held: Held) -> RankWork:
        """That of the step at which this rank is."""
        work, step = self.work, self.work.step
        own = replace(self.own, shared=held.shared, layers=held.layers)
        head, aux = jax.tree.map(lambda of_steps: of_steps[held.done], (step.head, step.aux))
        step = replace(step, shared=held.shared, head=head, aux=aux)
        chunks = own.chunks(self.layout, work.kinds, mirrored=False)
        return replace(work, step=step, ends=replace(work.ends, step=step), chunks=chunks)

    def _updated(self, carry: Carry, held: Held) -> Held:
        gradients = self.own.gradients(carry.shared_gradients, carry.layer_gradients, reduced=False)
        params, moments = self.update(gradients, held.moments, held.params)
        own = RankParameters.of(params, self.stored, self.own.execution)
        squares = held.squares.at[held.done].add(self._square(gradients))
        return Held(params, moments, own.shared, own.layers, held.done + 1, squares)

    def _square(self, gradients: Tree) -> jax.Array:
        """The squared norm of gradients, of parts that several devices have alike only once."""

        def of(stored: Stored, gradient: jax.Array, owns: jax.Array = True) -> jax.Array:
            alike = [axis for axis in (*REPLICAS, TP) if stored.dim(axis) is None]
            counts = sum(lax.axis_index(axis) for axis in alike) == 0
            square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
            return jnp.where(counts & owns, square, 0)

        squares = (
            jax.tree.map(of, self.stored["shared"], gradients["shared"], self.owned),
            jax.tree.map(of, self.stored["layers"], gradients["layers"]),
        )
        return sum(jax.tree.leaves(squares))

    @property
    def owned(self) -> Tree:
        """Of every leaf that no layer has whether this rank computes it; of others the first."""
        tables, head = self.work.step.tables, self.work.ends.head
        (first,), (last,) = tables.first_ranks, tables.last_ranks
        leaves, structure = jax.tree.flatten(self.work.step.shared)
        owners = [last if index in head.used else first for index in range(len(leaves))]
        return jax.tree.unflatten(structure, [lax.axis_index(PP) == rank for rank in owners])
