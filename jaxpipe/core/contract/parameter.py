"""How a parameter declares its sharding, and the rule that shards it over the mesh.

A model declares a `ParamSpec` with every parameter: over which mesh axes it is sharded, and over
which its gradient is partial. The rule derives the rest, for storage and for planning. What
outlives a step is sharded further: layers over pp by stage, embedding and head over pp along the
first dim that pp divides, and from ZeRO stage 1 on everything over replicas (Rajbhandari et al.
2020). Replicas shard the first dim that they divide, otherwise a dim that nothing else shards, in
blocks of 32 values and padded with zeros. A vocabulary that its devices do not divide is also
padded with zeros.

Data-parallel replicas are on the mesh axes rp, dp and ep, the most distant first. Nothing is
sharded over rp: each of its coordinates has all shards (hybrid sharding: Zhao et al. 2023, "PyTorch
FSDP", section 3.2.2), so all-gathers stay among neighbours and only gradient reductions cross rp. A
parameter may declare itself sharded over ep, the innermost axis (experts): ZeRO then shards it over
dp alone, and its gradient is summed over rp and dp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

PP, RP, DP, EP, TP = "pp", "rp", "dp", "ep", "tp"
ZERO_AXES = (DP, EP)  # the axes of replicas over which ZeRO shards
REPLICA_AXES = (
    RP,
    *ZERO_AXES,
)  # data-parallel replicas; neighbouring devices are on the innermost axis
Names = tuple[str, ...]
_BLOCK = 32  # a shard of a padded dim is a multiple of this many values


@dataclass(frozen=True)
class ParamSpec:
    """How a model declares one parameter.

    Attributes:
      sharded: `(mesh axis, dim)` for every axis over which the layer consumes the parameter
        sharded, in equal shards that are never gathered; the axis of the largest shards first where
        several shard one dim. Dims are numbered as in the layer.
      partial_grad_axes: axes other than the replicas' over which the parameter is replicated, but
        its gradient is partial (of this device's heads, tokens or stages) and must be summed.
      shape: shape of the full parameter without padding; None: unknown, and nothing is padded.
      matrix: input and output dim of a matrix or of a stack of matrices; None: a vector or a stack
        of vectors. Weight decay and Muon depend on it.
      uneven: whether the axes of `sharded` need not divide their dims. These dims are then padded
        with zeros at the end, which ops must ignore.
      trained: whether it has a gradient. A frozen parameter has no part in W, no gradient sum, no
        moments and no weight decay, and a trainer stores it in the compute dtype.

    Eight experts' matrices, sharded over ep:

    >>> sorted(ParamSpec(sharded=(("ep", 0),), shape=(8, 64, 32), matrix=(1, 2)).sharded_axes)
    ['ep']
    """

    sharded: tuple[tuple[str, int], ...] = ()
    partial_grad_axes: Names = ()
    shape: tuple[int, ...] | None = None
    matrix: tuple[int, int] | None = None
    uneven: bool = False
    trained: bool = True

    @property
    def sharded_axes(self) -> frozenset[str]:
        """The mesh axes over which the layer consumes the parameter sharded."""
        return frozenset(axis for axis, _ in self.sharded)


@dataclass(frozen=True)
class ShardingPlan:
    """How a parameter is stored.

    Attributes:
      dim_axes: for every dim the mesh axes that shard it, the axis of the largest shards first.
      padding: for every dim the zeros that are appended to it; 0 where nothing shards the dim.
    """

    dim_axes: tuple[Names, ...]
    padding: tuple[int, ...]

    def shard_size(
        self, shape: Sequence[int], mesh: Mapping[str, int], *, gathered: Names = ()
    ) -> int:
        """Number of values on one device of a parameter of this shape, gathered over some axes.

        Args:
          shape: of the full parameter, without padding.
          mesh: sizes of the mesh axes.
          gathered: mesh axes over which the parameter is all-gathered.

        >>> plan = ShardingPlan((("pp",), ("dp",), ("tp",)), (0, 0, 0))
        >>> plan.shard_size((4, 32, 48), {"pp": 4, "dp": 2, "tp": 2})
        384
        """
        sizes = [
            size + padding * bool(set(names).difference(gathered))
            for size, padding, names in zip(shape, self.padding, self.dim_axes)
        ]
        parts = prod(
            mesh[name] for entry in self.dim_axes for name in entry if name not in gathered
        )
        return prod(sizes) // parts


def plan_sharding(
    shape: Sequence[int],
    param: ParamSpec,
    mesh: Mapping[str, int],
    *,
    is_layer: bool,
    zero_stage: int,
) -> ShardingPlan:
    """The sharding of a stage-stacked parameter.

    Args:
      shape: full shape without padding; a layer's parameter has a leading dim of pipeline ranks.
      param: its declaration, whose dims do not count that leading dim.
      mesh: sizes of the mesh axes; rp and ep may be missing.
      is_layer: whether it belongs to a layer (otherwise to `embed_head`).
      zero_stage: from 1 on it is sharded over replicas too.

    >>> mesh = {"pp": 4, "dp": 2, "tp": 2}
    >>> wide = ParamSpec(sharded=(("tp", 1),), shape=(32, 48))
    >>> plan_sharding((4, 32, 48), wide, mesh, is_layer=True, zero_stage=1)
    ShardingPlan(dim_axes=(('pp',), ('dp',), ('tp',)), padding=(0, 0, 0))
    >>> plan_sharding((64, 32), ParamSpec((("tp", 0),)), mesh, is_layer=False, zero_stage=0)
    ShardingPlan(dim_axes=(('tp', 'pp'), ()), padding=(0, 0))
    >>> odd = ParamSpec((("tp", 0),), uneven=True)
    >>> plan_sharding((63, 32), odd, mesh, is_layer=False, zero_stage=0)
    ShardingPlan(dim_axes=(('tp', 'pp'), ()), padding=(1, 0))
    >>> plan_sharding((4, 4096, 1024), wide, mesh | {"dp": 6}, is_layer=True, zero_stage=1)
    ShardingPlan(dim_axes=(('pp',), ('dp',), ('tp',)), padding=(0, 128, 0))
    >>> experts = ParamSpec(sharded=(("ep", 0),), shape=(8, 64, 32))
    >>> plan_sharding((4, 8, 64, 32), experts, mesh | {"ep": 4}, is_layer=True, zero_stage=1)
    ShardingPlan(dim_axes=(('pp',), ('ep', 'dp'), (), ()), padding=(0, 0, 0, 0))
    """
    first = int(is_layer)
    division = _Division.start(shape, param, mesh, first)
    every = range(first, len(shape))
    if is_layer:
        division.divide((PP,), [0])
    for axis, dim in param.sharded:
        if mesh.get(axis, 1) > 1 or axis == PP:
            division.divide((axis,), [first + dim])
    if not is_layer and PP not in param.sharded_axes:
        division.divide((PP,), every)
    replicas = tuple(
        axis
        for axis in reversed(ZERO_AXES)
        if axis not in param.sharded_axes and (axis == DP or mesh.get(axis, 1) > 1)
    )
    shards_replicas = zero_stage and division.parts(replicas) > 1
    if shards_replicas and not division.divide(replicas, every) and param.shape is not None:
        division.divide_padded(replicas, every)
    return ShardingPlan(tuple(division.names), tuple(division.padding))


@dataclass
class _Division:
    """The dims of a parameter while mesh axes are assigned to them.

    Attributes:
      mesh: sizes of the mesh axes.
      sizes: size of each dim's shard, with padding.
      names: for every dim the mesh axes that shard it.
      padding: for every dim the zeros appended to it.
    """

    mesh: Mapping[str, int]
    sizes: list[int]
    names: list[Names]
    padding: list[int]

    @classmethod
    def start(
        cls, shape: Sequence[int], param: ParamSpec, mesh: Mapping[str, int], first: int
    ) -> "_Division":
        """Return undivided dims; those that a parameter shards unevenly are padded."""
        padding = [0] * len(shape)
        for _, dim in param.sharded if param.uneven else ():
            parts = prod(mesh.get(axis, 1) for axis, of in param.sharded if of == dim)
            padding[first + dim] = -shape[first + dim] % parts
        sizes = [size + more for size, more in zip(shape, padding)]
        return cls(mesh, sizes, [()] * len(shape), padding)

    def parts(self, axes: Names) -> int:
        """Return the number of devices along some axes."""
        return prod(self.mesh.get(axis, 1) for axis in axes)

    def divide(self, axes: Names, dims: Sequence[int]) -> bool:
        """Shard the first of `dims` that the devices along `axes` divide; whether there is one."""
        parts = self.parts(axes)
        for dim in dims:
            if self.sizes[dim] % parts == 0:
                self.sizes[dim] //= parts
                self.names[dim] += axes
                return True
        return False

    def divide_padded(self, axes: Names, dims: Sequence[int]) -> None:
        """Shard the dim of `dims` that nothing shards and that needs the least padding, if any."""
        free = [dim for dim in dims if not self.names[dim]]
        found = _least_padded(free, self.sizes, self.parts(axes))
        if found is not None:
            dim, self.padding[dim] = found
            self.names[dim] = axes


def _least_padded(
    free: Sequence[int], sizes: Sequence[int], replicas: int
) -> tuple[int, int] | None:
    """The dim that replicas can shard with the least relative padding, and that padding.

    Only dims that are multiples of `_BLOCK` count; None if no shard would be smaller than the dim.
    """
    parts = {
        dim: -(-sizes[dim] // (replicas * _BLOCK)) * _BLOCK
        for dim in free
        if sizes[dim] % _BLOCK == 0
    }
    smaller = [dim for dim, part in parts.items() if part < sizes[dim]]
    if not smaller:
        return None
    best = min(smaller, key=lambda dim: parts[dim] / sizes[dim])
    return best, replicas * parts[best] - sizes[best]
