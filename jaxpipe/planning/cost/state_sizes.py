"""Numbers of values that one device stores of parameters and of optimizer states."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from jaxpipe.config import Config, OptimizerConfig
from jaxpipe.core.contract.parameter import DP, EP, PP, RP, TP, ZERO_AXES, ShardingPlan
from jaxpipe.planning.cost.costs import ITEMSIZE, costs_of, essentials

FLOAT32 = 4
Axes = tuple[str, ...]
Select = Callable[[Any], Any]  # a stage-stacked tree to the subtree of a layer, or of embed_head


class StoredValues(NamedTuple):
    """What one device stores of a layer of some kind, or of embedding, final norm and head.

    Attributes:
      shard: number of values of the stored parameters.
      full: parameters as ops read them: all-gathered over replicas, embed_head also over pp.
      gathered: of `full`, parameters of which the device stores a shard.
      of_layers: parameters as layers read them, those of embed_head all-gathered over pp even where
        embedding and head are vocabulary-parallel.
      moments: bytes of the optimizer's moments.
      of_rank: bytes of parameters, gradients and moments, those of embed_head all-gathered over pp.
      reduced: values that a device sends in a reduce-scatter of the gradients in a ring of all
        devices that have one to add.
    """

    shard: int
    full: int
    gathered: int
    of_layers: int
    moments: int
    of_rank: int
    reduced: float


TrainedAndFrozen = tuple[StoredValues, StoredValues]


def stored_values(config: Config) -> tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]:
    """What one device stores of a layer of each kind, and of embed_head."""
    parallel = config.parallel
    shards = parallel.dp // (parallel.dp_replicate * parallel.ep)
    sizes = parallel.pp, parallel.dp_replicate, shards, parallel.ep, parallel.tp
    model = essentials(config)
    # Candidates of a plan have the same parameters, and most of a search.
    train = replace(model.train, microbatch_size=1, remat="none", loss_chunks=1)
    key = replace(model, train=train), config.optimizer, sizes, parallel.zero_stage
    if key not in _known:
        _known[key] = _values_on(model, *key[1:])
    return _known[key]


_known: dict[tuple[Any, ...], tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]] = {}


def _values_on(
    model: Config, optimizer: OptimizerConfig, sizes: tuple[int, ...], zero_stage: int
) -> tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]:
    """`stored_values` on a mesh of these sizes. Moments are what the optimizer's `init` returns.

    Arrays of an optimizer that belong to no parameter, such as a count, are left out.
    """
    import jax  # imported here: planning imports no jax

    from jaxpipe.core.mesh import Sharding, stage_stacked_trees
    from jaxpipe.optimizer import build

    costs = costs_of(model)
    kinds = [kind.parameters for kind in costs.kinds.values()]
    mesh = jax.sharding.AbstractMesh(sizes, (PP, RP, DP, EP, TP))
    sharding = Sharding(mesh, costs.embed_head.specs, lambda slot: kinds[slot].specs, zero_stage)
    stack = lambda leaf: jax.ShapeDtypeStruct((sizes[0], *leaf.shape), leaf.dtype)  # noqa: E731
    layers = tuple(jax.tree.map(stack, kind.shapes) for kind in kinds)
    params = {"embed_head": costs.embed_head.shapes, "layers": layers}
    params = jax.eval_shape(sharding.pad, params)
    state = jax.eval_shape(build(optimizer, 1, sharding.param_shardings).init, params)
    state = stage_stacked_trees(state)

    def values(select: Select, ranks: Axes, trained: bool) -> StoredValues:
        def each(tree: Any, gathered: Axes = (), always: Axes = (), unit: int = 0) -> Iterator[int]:
            """Bytes of every selected array, gathered over some axes; `unit`: of a value."""
            leaves, stored = jax.tree.leaves(select(tree)), select(sharding.param_shardings(tree))
            for leaf, how in zip(leaves, jax.tree.leaves(stored)):
                if how.param.trained == trained:
                    axes = *always, *(a for a in gathered if a not in how.param.sharded_axes)
                    plan, shape = ShardingPlan(how.dim_axes, how.padding), leaf.shape
                    size = plan.shard_size(how.unpadded_shape(shape), mesh.shape, gathered=axes)
                    yield (unit or leaf.dtype.itemsize) * size

        def held(tree: Any, *gathered: Axes, unit: int = 0) -> int:
            return sum(each(tree, *gathered, unit=unit))

        def reduced() -> float:
            """Values of the selected arrays that a ring of `(RP, *ZERO_AXES, *ranks)` sends."""
            total = 0.0
            leaves, stored = (
                jax.tree.leaves(select(params)),
                select(sharding.param_shardings(params)),
            )
            for leaf, how in zip(leaves, jax.tree.leaves(stored)):
                axes = {RP, *ZERO_AXES, *ranks} - {*how.param.sharded_axes}
                devices = prod(mesh.shape[axis] for axis in axes)
                if how.param.trained:
                    plan = ShardingPlan(how.dim_axes, how.padding)
                    shape = how.unpadded_shape(leaf.shape)
                    full = plan.shard_size(shape, mesh.shape, gathered=tuple(axes))
                    total += full * (devices - 1) / devices
            return total

        item = FLOAT32 if trained else ITEMSIZE[model.train.compute_dtype]
        stored, full = each(params, unit=1), [*each(params, (*ZERO_AXES, *ranks), unit=1)]
        return StoredValues(
            shard=held(params, unit=1),
            full=sum(full),
            gathered=sum(size for size, shard in zip(full, stored) if size != shard),
            of_layers=held(params, ZERO_AXES, ranks, unit=1),
            moments=sum(held(tree) for tree in state),
            of_rank=held(params, ranks, unit=item + FLOAT32 * trained)
            + sum(held(tree, ranks) for tree in state),
            reduced=reduced() if trained else 0.0,
        )

    def both(select: Select, ranks: Axes = ()) -> TrainedAndFrozen:
        return values(select, ranks, trained=True), values(select, ranks, trained=False)

    by_kind = {
        name: both(lambda tree, slot=slot: tree["layers"][slot])
        for slot, name in enumerate(costs.kinds)
    }
    return by_kind, both(lambda tree: tree["embed_head"], (PP,))
