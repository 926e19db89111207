"""The pipelined step: one `shard_map`, one scan over the ticks of a schedule's tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.parallel import DP, PP, TP, Sharding, Stored, batch_spec
from jaxpipe.pipeline.chunk import Chunk
from jaxpipe.pipeline.ends import OwnEnds, SharedEnds
from jaxpipe.pipeline.split import POLICIES, Policy, split_layer
from jaxpipe.pipeline.stage import SharedPart, StageFunctions
from jaxpipe.pipeline.tick import RankWork
from jaxpipe.schedule import Schedule, Tables, forward_only, lower

Tree = Any


@dataclass(frozen=True)
class Execution:
    """How a schedule is run; none of it changes what is computed.

    `transfer_ticks` and `in_flight` are explained at `jaxpipe.schedule.cells.place`. `remat` names
    a policy of `jaxpipe.pipeline.split.POLICIES`, or is one of `jax.checkpoint_policies`, such as
    `save_only_these_names(...)`: it says what F may store for B and W. `defer_ends` lets the
    gradients of the head's and the embedding's matrices wait for W of their stages, for the memory
    of what they take: a whole gradient of the logits for each microbatch that waits.
    `vocab_parallel` has every rank hold and compute a part of the vocabulary at both ends, for
    functions whose collectives span pp too. Parameters are
    cast to `compute_dtype` once a step (None: kept); gradients are accumulated in the parameters'
    own dtype. In float16 they are divided by the number of the loss's terms only at the end: a
    term's share of the mean would be lost below its least number.

    `zero_stage` says what the replicas along dp hold parts of (Rajbhandari et al. 2020): 1 all that
    outlives a step, 2 the gradients too, which are then scattered as they are summed; 3 the
    parameters also within a step if `reshard_after_forward`, where every action gathers a layer
    anew and scatters its gradient. Otherwise parameters are gathered once a step.

    `poison_bubbles` fills idle messages and free slots with NaN, to show that no result
    depends on them.
    """

    transfer_ticks: int = 1
    in_flight: int | None = None
    remat: str | Policy = "none"
    defer_ends: bool = False
    vocab_parallel: bool = False
    compute_dtype: Any = None
    zero_stage: int = 0
    reshard_after_forward: bool = False
    poison_bubbles: bool = False


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
    execution: Execution = Execution()

    @property
    def sharding(self) -> Sharding:
        """How parameters, and gradients as they are returned, are stored."""
        execution = self.execution
        return Sharding(
            self.mesh, self.functions.cuts, execution.zero_stage, execution.vocab_parallel
        )

    def losses_and_gradients(self, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Each microbatch's share of the loss, `[M]`, and the gradients of their sum.

        The loss is the sum over all examples divided by the number of its terms (0 where there are
        none). Gradients come in the form, dtype and sharding of `params`.
        """
        return self._run(self.schedule, params, batch)

    def losses(self, params: Tree, batch: Tree) -> jax.Array:
        """Each microbatch's share of the loss, `[M]`, by a forward-only pass."""
        schedule = self.schedule
        forward = forward_only(schedule.placement, schedule.microbatches, schedule.slices)
        return self._run(forward, params, batch)[0]

    def _run(self, schedule: Schedule, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        self._check_fit(params, batch)
        tables = lower(
            schedule,
            transfer_ticks=self.execution.transfer_ticks,
            in_flight=self.execution.in_flight,
            defer_ends=self.execution.defer_ends,
            vocab_parallel=self.execution.vocab_parallel,
        )
        stored = self.sharding.stored(params)
        specs = jax.tree.map(lambda leaf: leaf.spec, stored)
        active = self._active(len(params["layers"]) // schedule.placement.own_chunks)
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
    columns: dict[str, jax.Array],
) -> tuple[jax.Array, Tree]:
    """The whole step as one rank sees it: local shapes, pp, dp and tp bound."""
    stored = stored | {"layers": jax.tree.map(lambda leaf: leaf.of_rank, stored["layers"])}
    masters = params | {"layers": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
    held = jax.tree.map(lambda leaf: _cast(leaf, execution), masters)
    shared = jax.tree.map(
        lambda s, leaf: s.gather(leaf, {DP} if s.ranks == "part" else {PP, DP}),
        stored["shared"],
        held["shared"],
    )
    each = stored["layers"][0]

    def whole(layer: Tree) -> Tree:
        return jax.tree.map(lambda s, leaf: s.gather(leaf, {DP}), each, layer)

    reshard = execution.reshard_after_forward
    layers = held["layers"] if reshard else tuple(map(whole, held["layers"]))
    one_layer = jax.eval_shape(whole, held["layers"][0])
    microbatch = jax.eval_shape(lambda batch: jax.tree.map(lambda a: a[0], batch), batch)
    x = jax.eval_shape(functions.embed, shared, microbatch)
    entering = functions.entering(x, microbatch)
    head = SharedPart.trace(functions.head, shared, x, microbatch)
    split = head_split = None
    if tables.trains:
        remat = execution.remat
        policy = POLICIES[remat] if isinstance(remat, str) else remat
        split = split_layer(functions.layer, one_layer, entering, microbatch, policy)
        head_split = head.split(shared, x, microbatch)

    terms = lax.psum(jax.vmap(functions.count)(batch).sum(), DP)
    loss = jax.eval_shape(functions.head, shared, x, microbatch)
    share = jnp.where(terms > 0, 1 / jnp.maximum(terms, 1).astype(loss.dtype), 0)
    at_end = execution.compute_dtype == jnp.float16
    chunks = _chunks(layers, active, each if reshard else None)
    ends = (SharedEnds if tables.vocab_parallel else OwnEnds)(
        functions=functions,
        embed=SharedPart.trace(functions.embed, shared, microbatch),
        head=head,
        split=head_split,
        shared=shared,
        batch=batch,
        share=share,
        seed=jnp.ones_like(share) if at_end else share,
        tables=tables,
    )
    work = RankWork(
        functions=functions,
        ends=ends,
        split=split,
        state=None if functions.state is None else entering[1],
        shared=shared,
        chunks=chunks,
        batch=batch,
        tables=tables,
        poison=execution.poison_bubbles,
    )
    like = lambda values, leaves: jax.tree.map(  # noqa: E731
        lambda value, leaf: jax.ShapeDtypeStruct(value.shape, leaf.dtype), values, leaves
    )
    layer = like(layers[0], masters["layers"][0])
    totals = {
        "shared": like(shared, masters["shared"]),
        "layers": tuple((layer,) * len(chunk.layers) for chunk in chunks),
    }
    carry, _ = lax.scan(
        lambda carry, row: (work.tick(carry, row), None),
        work.first_carry(x, totals),
        {name: column[:, 0] for name, column in columns.items()},
    )
    losses = lax.psum(carry.losses, (PP, DP))
    if split is None:
        return losses, None
    home = _brought_home(carry.layer_gradients, len(layers))
    shared_gradients = jax.tree.map(
        lambda s, g: _shared_gradient(s, g, execution), stored["shared"], carry.shared_gradients
    )
    layer_gradients = jax.tree.map(
        lambda s, g: _reduced(s, g, _unreduced(s, reshard), execution)[None],
        stored["layers"],
        home,
    )
    gradients = {"shared": shared_gradients, "layers": layer_gradients}
    if at_end:
        gradients = jax.tree.map(lambda gradient: gradient * share, gradients)
    return losses, gradients


def _shared_gradient(stored: Stored, gradient: jax.Array, execution: Execution) -> jax.Array:
    """This device's part of the gradient of a leaf that no layer has."""
    if stored.ranks == "same":
        gradient = stored.part(gradient, {PP})
    return _reduced(stored, gradient, {PP, DP} if stored.ranks == "add" else {DP}, execution)


def _unreduced(stored: Stored, reshard: bool) -> set[str]:
    """The axes over which a layer's gradient is still to be summed after the last tick."""
    return set() if reshard and stored.axis(DP) is not None else {DP}


def _reduced(
    stored: Stored, gradient: jax.Array, names: set[str], execution: Execution
) -> jax.Array:
    """This device's part of a gradient summed over these axes, and over tp where it must be."""
    if stored.summed:
        gradient = lax.psum(gradient, TP)
    if execution.zero_stage == 1 and DP in names:
        gradient = stored.reduce(gradient, names - {DP})
        return stored.part(lax.psum(gradient, DP), {DP})
    return stored.reduce(gradient, names)


def _chunks(layers: tuple[Tree, ...], active: np.ndarray, gathered: Tree) -> tuple[Chunk, ...]:
    """The stages this rank computes; where there are more than it holds, the rest is mirrored.

    A mirrored stage of rank r is held by rank P-1-r, which sends a copy of it once a step.
    """
    _, chunks, slots = active.shape
    if chunks * slots > len(layers):
        layers = (*layers, *_mirror(layers))
    here = jnp.asarray(active)[lax.axis_index(PP)]
    return tuple(
        Chunk(
            layers[chunk * slots : (chunk + 1) * slots],
            tuple(
                None if active[:, chunk, slot].all() else here[chunk, slot] for slot in range(slots)
            ),
            gathered,
        )
        for chunk in range(chunks)
    )


def _brought_home(gradients: tuple[tuple[Tree, ...], ...], held: int) -> tuple[Tree, ...]:
    """Gradients of the layers that this rank holds, those of their mirrored copies added."""
    flat = tuple(tree for chunk in gradients for tree in chunk)
    own, mirrored = flat[:held], flat[held:]
    return jax.tree.map(jnp.add, own, _mirror(mirrored)) if mirrored else own


def _mirror(tree: Tree) -> Tree:
    """What rank P-1-r has, on rank r."""
    size = lax.axis_size(PP)
    across = [(r, size - 1 - r) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, across), tree)


def _cast(leaf: jax.Array, execution: Execution) -> jax.Array:
    return leaf if execution.compute_dtype is None else leaf.astype(execution.compute_dtype)
