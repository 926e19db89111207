"""The pipelined step: one `shard_map`, one scan over the ticks of a schedule's tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.parallel import DP, PP, Sharding, batch_spec
from jaxpipe.pipeline.ends import OwnEnds, SharedEnds
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.parameters import RankParameters
from jaxpipe.pipeline.split import split_layer
from jaxpipe.pipeline.stage import SharedPart, StageFunctions
from jaxpipe.pipeline.tick import RankWork
from jaxpipe.schedule import Row, Schedule, Tables, forward_only, lower

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model, a schedule and a mesh that fit together: what runs a step.

    Attributes:
      functions: the model as stages see it.
      schedule: which rank does what in which order.
      mesh: a (pp, dp, tp) mesh; its pp must be the schedule's.
      layers_per_stage: layers of each stage (None: every slot of every stage holds one).
      execution: how the schedule is run.

    Both methods take parameters in stage form (`jaxpipe.parallel.StageLayout.stack`) and a batch
    `[M, B, ...]`, B cut over dp, and raise `ValueError` where these do not fit the rest.
    """

    functions: StageFunctions
    schedule: Schedule
    mesh: Mesh
    layers_per_stage: Sequence[int] | None = None
    execution: Execution = field(default_factory=Execution)

    @property
    def sharding(self) -> Sharding:
        """How parameters, and gradients as they are returned, are stored."""
        execution = self.execution
        return Sharding(
            self.mesh,
            self.functions.cuts,
            execution.zero_stage,
            execution.lockstep.vocab_parallel,
        )

    @cached_property
    def tables(self) -> Tables:
        """What the scan of a step reads; raises what `lower` raises."""
        return lower(self.schedule, self.execution.lockstep)

    @cached_property
    def forward_tables(self) -> Tables:
        """What the scan of a forward-only pass reads; nothing is held, so nothing limits it."""
        schedule = self.schedule
        forward = forward_only(schedule.placement, schedule.microbatches, schedule.slices)
        return lower(forward, replace(self.execution.lockstep, in_flight=None))

    def losses_and_gradients(self, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Each microbatch's share of the loss, `[M]`, and the gradients of their sum.

        The loss is the sum over all examples divided by the number of its terms (0 where there are
        none). Gradients come in the form, dtype and sharding of `params`.
        """
        return self._run(self.tables, params, batch)

    def losses(self, params: Tree, batch: Tree) -> jax.Array:
        """Each microbatch's share of the loss, `[M]`, by a forward-only pass."""
        return self._run(self.forward_tables, params, batch)[0]

    def _run(self, tables: Tables, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        self._check_fit(params, batch)
        stored = self.sharding.stored(params)
        specs = jax.tree.map(lambda leaf: leaf.spec, stored)
        active = self._active(len(params["layers"]) // self.schedule.placement.own_chunks)
        return jax.shard_map(
            partial(_rank_program, self.functions, tables, self.execution, active, stored),
            mesh=self.mesh,
            in_specs=(specs, batch_spec(), PartitionSpec(None, PP)),
            out_specs=(PartitionSpec(), specs if tables.trains else None),
            check_vma=False,  # the collectives stand outside everything differentiated
        )(params, batch, tables.columns)

    def _active(self, slots: int) -> np.ndarray:
        """Whether a rank has a layer in a slot of a chunk: `[P, chunks, slots]`."""
        placement = self.schedule.placement
        counts = self.layers_per_stage or [slots] * placement.stages
        active = np.zeros((placement.pp, placement.own_chunks, slots), bool)
        for stage, rank in enumerate(placement.rank_of):
            active[rank, placement.chunk(stage), : counts[stage]] = True
        if placement.mirrored_from is not None:
            active = np.concatenate([active, active[::-1]], axis=1)
        return active

    def _check_fit(self, params: Tree, batch: Tree) -> None:
        pp, dp, schedule = self.mesh.shape[PP], self.mesh.shape[DP], self.schedule
        if (schedule.slices > 1) != (self.functions.state is not None):
            raise ValueError(
                f"{schedule.name} has slices={schedule.slices}: the functions need a state if, and "
                f"only if, there is more than one."
            )
        if schedule.pp != pp:
            raise ValueError(f"the schedule has {schedule.pp} ranks but the mesh has pp={pp}.")
        chunks, counts = schedule.placement.own_chunks, self.layers_per_stage
        slots, rest = divmod(len(params["layers"]), chunks)
        if rest or (counts and (len(counts) != schedule.stages or max(counts) != slots)):
            raise ValueError(
                f"layers_per_stage={counts and list(counts)} with {len(params['layers'])} layer "
                f"slots a rank: {schedule.name} has {schedule.stages} stages, {chunks} a rank, so "
                f"it needs {schedule.stages} counts whose largest, times {chunks}, is the slots."
            )
        for leaf in jax.tree.leaves(batch):
            if leaf.shape[0] != schedule.microbatches or leaf.shape[1] % dp:
                raise ValueError(
                    f"a batch leaf has shape {leaf.shape}: it needs [M, B, ...] with the "
                    f"schedule's M={schedule.microbatches} and B a multiple of dp={dp}."
                )


def loss_and_gradients(
    functions: StageFunctions,
    params: Tree,
    batch: Tree,
    schedule: Schedule,
    mesh: Mesh,
    **options: Any,
) -> tuple[jax.Array, Tree]:
    """Loss and gradients of one step, by pipeline; `options` are further fields of `Pipeline`.

    A regression through four layers on two ranks:

    >>> import jax, jax.numpy as jnp
    >>> from jaxpipe import schedule
    >>> from jaxpipe.parallel import StageLayout, make_mesh
    >>> toy = StageFunctions(
    ...     embed=lambda shared, mb: mb["inputs"] @ shared["enter"],
    ...     layer=lambda w, x, mb: x + jnp.tanh(x @ w),
    ...     head=lambda shared, x, mb: jnp.sum((x @ shared["leave"] - mb["targets"]) ** 2),
    ...     count=lambda mb: jnp.size(mb["targets"]),
    ... )
    >>> layout = StageLayout((2, 2))
    >>> params = {
    ...     "shared": {"enter": jnp.eye(4), "leave": jnp.ones((4, 1))},
    ...     "layers": layout.stack([0.1 * jnp.eye(4)] * 4),
    ... }
    >>> batch = {"inputs": jnp.ones((8, 2, 4)), "targets": jnp.ones((8, 2, 1))}
    >>> mesh = make_mesh(pp=2, devices=jax.devices()[:2])
    >>> one_f_one_b = schedule.build("1f1b", pp=2, microbatches=8)
    >>> loss, gradients = loss_and_gradients(toy, params, batch, one_f_one_b, mesh)
    >>> print(f"{loss:.3f}", gradients["layers"][0].shape)
    23.492 (2, 4, 4)
    """
    pipeline = Pipeline(functions, schedule, mesh, **options)
    losses, gradients = pipeline.losses_and_gradients(params, batch)
    return losses.sum(), gradients


def _rank_program(
    functions: StageFunctions,
    tables: Tables,
    execution: Execution,
    active: np.ndarray,
    stored: Tree,
    params: Tree,
    batch: Tree,
    columns: Row,
) -> tuple[jax.Array, Tree]:
    """The whole step as one rank sees it: local shapes, pp, dp and tp bound."""
    own = RankParameters.of(params, stored, execution)
    chunks = own.chunks(active)
    microbatch = jax.eval_shape(lambda batch: jax.tree.map(lambda a: a[0], batch), batch)
    x = jax.eval_shape(functions.embed, own.shared, microbatch)
    entering = functions.entering(x, microbatch)
    split = None
    if tables.trains:
        split = split_layer(functions.layer, own.one_layer, entering, microbatch, execution.policy)
    ends = _ends(functions, tables, execution, own.shared, x, microbatch, batch)
    work = RankWork(
        functions=functions,
        ends=ends,
        split=split,
        state=None if functions.state is None else entering[1],
        shared=own.shared,
        chunks=chunks,
        batch=batch,
        tables=tables,
        poison=execution.poison_bubbles,
    )
    carry, _ = lax.scan(
        lambda carry, row: (work.tick(carry, row), None),
        work.first_carry(x, own.totals(chunks)),
        jax.tree.map(lambda column: column[:, 0], columns),
    )
    losses = lax.psum(carry.losses, (PP, DP))
    if split is None:
        return losses, None
    gradients = own.gradients(carry.shared_gradients, carry.layer_gradients)
    if execution.divides_at_end:
        gradients = jax.tree.map(lambda gradient: gradient * ends.share, gradients)
    return losses, gradients


def _ends(
    functions: StageFunctions,
    tables: Tables,
    execution: Execution,
    shared: Tree,
    x: jax.ShapeDtypeStruct,
    microbatch: Tree,
    batch: Tree,
) -> OwnEnds | SharedEnds:
    """Embedding and head, traced at the shapes of `x` and `microbatch`."""
    head = SharedPart.trace(functions.head, shared, x, microbatch)
    terms = lax.psum(jax.vmap(functions.count)(batch).sum(), DP)
    loss = jax.eval_shape(functions.head, shared, x, microbatch)
    share = jnp.where(terms > 0, 1 / jnp.maximum(terms, 1).astype(loss.dtype), 0)
    return (SharedEnds if tables.lockstep.vocab_parallel else OwnEnds)(
        functions=functions,
        embed=SharedPart.trace(functions.embed, shared, microbatch),
        head=head,
        split=head.split(shared, x, microbatch) if tables.trains else None,
        shared=shared,
        batch=batch,
        share=share,
        seed=jnp.ones_like(share) if execution.divides_at_end else share,
        tables=tables,
    )
