"""Numbers of values that one device stores of parameters and of optimizer states."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec.structs import replace

from jaxpipe.config import Config, OptimizerConfig
from jaxpipe.core.contract.parameter import DP, EP, PP, RP, TP, ZERO_AXES, ShardingPlan
from jaxpipe.planning.cost.costs import ITEMSIZE, costs_of, essentials

if TYPE_CHECKING:
    from jaxpipe.core.mesh import ParamSharding, Sharding

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
      reduced: values that a device sends in a reduce-scatter of the gradients in a ring of the
        devices that have one to add, within its group of replicas (`parallel.dp_replicate`).
      across: values that it sends in a reduce-scatter of the results among the groups.
    """

    shard: int
    full: int
    gathered: int
    of_layers: int
    moments: int
    of_rank: int
    reduced: float
    across: float


TrainedAndFrozen = tuple[StoredValues, StoredValues]


def stored_values(config: Config) -> tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]:
    """What one device stores of a layer of each kind, and of embed_head."""
    parallel = config.parallel
    shards = parallel.dp // (parallel.dp_replicate * parallel.ep_replicas)
    sizes = parallel.pp, parallel.dp_replicate, shards, parallel.ep_replicas, parallel.tp
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
    """`stored_values` on a mesh of these sizes."""
    state = _ShardedState.of(model, optimizer, sizes, zero_stage)

    def of_slot(slot: int) -> Select:
        return lambda tree: tree["layers"][slot]

    kinds = enumerate(costs_of(model).kinds)
    by_kind = {name: state.values(of_slot(slot)) for slot, name in kinds}
    return by_kind, state.values(lambda tree: tree["embed_head"], (PP,))


@dataclass(frozen=True)
class _ShardedState:
    """Shapes of parameters and of the optimizer's state, and how a mesh stores them.

    Attributes:
      sharding: of stage-stacked trees.
      mesh: its sizes by axis.
      params: padded shapes, stage-stacked.
      moments: stage-stacked trees of what the optimizer's `init` returns, without arrays that
        belong to no parameter, such as a count.
      itemsize: bytes of a value in the compute dtype.
    """

    sharding: "Sharding"
    mesh: Mapping[str, int]
    params: Any
    moments: Sequence[Any]
    itemsize: int

    @classmethod
    def of(
        cls, model: Config, optimizer: OptimizerConfig, sizes: tuple[int, ...], zero_stage: int
    ) -> Self:
        """The state of a model with an optimizer on a mesh of these sizes."""
        import jax  # imported here: planning imports no jax

        from jaxpipe.core.mesh import Sharding, stage_stacked_trees
        from jaxpipe.optimizer import build

        costs = costs_of(model)
        kinds = [kind.parameters for kind in costs.kinds.values()]
        mesh: Any = jax.sharding.AbstractMesh(sizes, (PP, RP, DP, EP, TP))
        specs = costs.embed_head.specs
        sharding = Sharding(mesh, specs, lambda slot: kinds[slot].specs, zero_stage)
        stack = lambda leaf: jax.ShapeDtypeStruct((sizes[0], *leaf.shape), leaf.dtype)  # noqa: E731
        layers = tuple(jax.tree.map(stack, kind.shapes) for kind in kinds)
        params = {"embed_head": costs.embed_head.shapes, "layers": layers}
        params = jax.eval_shape(sharding.pad, params)
        state = jax.eval_shape(build(optimizer, 1, sharding.param_shardings).init, params)
        itemsize = ITEMSIZE[model.train.compute_dtype]
        return cls(sharding, mesh.shape, params, stage_stacked_trees(state), itemsize)

    def values(self, select: Select, ranks: Axes = ()) -> TrainedAndFrozen:
        """What a device stores of a part; `ranks`: axes of ranks that gather it for its ops."""
        return self._values(select, ranks, True), self._values(select, ranks, False)

    def _values(self, select: Select, ranks: Axes, trained: bool) -> StoredValues:
        each = partial(self._bytes, select, trained)
        params = partial(each, self.params, unit=1)
        stored, full = [*params()], [*params((*ZERO_AXES, *ranks))]
        item = FLOAT32 + FLOAT32 if trained else self.itemsize
        of_rank = sum(each(self.params, ranks, unit=item))
        traffic = [*self._reduced(select, ranks)] if trained else []
        return StoredValues(
            shard=sum(stored),
            full=sum(full),
            gathered=sum(size for size, shard in zip(full, stored) if size != shard),
            of_layers=sum(params(ZERO_AXES, ranks)),
            moments=sum(sum(each(tree)) for tree in self.moments),
            of_rank=of_rank + sum(sum(each(tree, ranks)) for tree in self.moments),
            reduced=sum((within for within, _ in traffic), 0.0),
            across=sum((across for _, across in traffic), 0.0),
        )

    def _bytes(
        self, select: Select, trained: bool, tree: Any, gathered: Axes = (), always: Axes = (),
        unit: int = 0,
    ) -> Iterator[int]:  # fmt: skip
        """Bytes of every selected array, gathered over some axes; `unit`: of a value."""
        for leaf, how in self._selected(select, tree):
            if how.param.trained == trained:
                axes = *always, *(a for a in gathered if a not in how.param.sharded_axes)
                yield (unit or leaf.dtype.itemsize) * self._shard_size(leaf, how, axes)

    def _reduced(self, select: Select, ranks: Axes) -> Iterator[tuple[float, float]]:
        """Values of the selected arrays that rings of `(*ZERO_AXES, *ranks)`, then of RP, send."""
        groups = self.mesh[RP]
        for leaf, how in self._selected(select, self.params):
            axes = {*ZERO_AXES, *ranks} - {*how.param.sharded_axes}
            devices = prod(self.mesh[axis] for axis in axes)
            if how.param.trained:
                each = self._shard_size(leaf, how, tuple(axes)) / devices
                yield each * (devices - 1), each * (groups - 1) / groups

    def _selected(self, select: Select, tree: Any) -> Iterator[tuple[Any, "ParamSharding"]]:
        """The selected arrays of a stage-stacked tree, each with how it is stored."""
        import jax

        stored = select(self.sharding.param_shardings(tree))
        return zip(jax.tree.leaves(select(tree)), jax.tree.leaves(stored))

    def _shard_size(self, leaf: Any, how: "ParamSharding", gathered: Axes) -> int:
        plan, shape = ShardingPlan(how.dim_axes, how.padding), how.unpadded_shape(leaf.shape)
        return plan.shard_size(shape, self.mesh, gathered=gathered)
