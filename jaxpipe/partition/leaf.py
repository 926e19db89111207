"""One record for a parameter, and the rule by which it is cut over the mesh: plain arithmetic.

A model declares a `Leaf` with every parameter: along which mesh axes devices have parts of it, and
whose gradients add up. All else follows, for storing and for planning: what outlives a step is cut
further, layers over the ranks of their stages, shared leaves over pp along the first dim that it
divides, and from ZeRO stage 1 on everything over replicas (Rajbhandari et al. 2020), along the
first dim that they divide, or else along one that nothing else cuts, in blocks of 32 and padded
with zeros. Zeros also pad a vocabulary that the devices which share it do not divide.

The replicas are on the mesh axes rp, dp and ep, from far to near. Nothing is ever cut over rp: each
of its coordinates has all parts (hybrid sharding: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2),
so what is gathered comes from neighbours, and only sums of gradients go further. A leaf may be cut
over ep, the innermost, like any other axis (experts): it is then stored in parts over dp alone, and
its gradient is summed over rp and dp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

PP, RP, DP, EP, TP = "pp", "rp", "dp", "ep", "tp"
SHARDS = (DP, EP)  # the replicas that ZeRO lets hold parts
REPLICAS = (RP, *SHARDS)  # which train on other examples each; neighbours are on the innermost
Names = tuple[str, ...]
_BLOCK = 32  # values along a padded dim, of which every replica has whole blocks


@dataclass(frozen=True)
class Leaf:
    """What a model says of one parameter.

    Attributes:
      cuts: `(mesh axis, dim)` for every axis whose devices have an equal part each, largest parts
        first where they cut the same dim: what ops read is the part, and nobody gathers it. Dims
        are those of the parameter as its layer sees it.
      summed: the axes, other than the replicas, along which every device has all of it but the
        gradient of its own heads, tokens or stages alone, so that gradients must be added up.
      shape: the whole parameter's, of which what is stored may be a padded form; where it is not
        known, None, nothing is padded.
      matrix: its input and output dim if it is a matrix, or a stack of matrices along other dims;
        None: a vector. Weight decay and Muon go by this.
      uneven: whether the axes of `cuts` need not divide their dims: then these are padded with
        zeros, and ops must make nothing of the zeros at the end of the last parts.

    Eight experts' matrices, of which each device along ep has its equal part:

    >>> sorted(Leaf(cuts=(("ep", 0),), shape=(8, 64, 32), matrix=(1, 2)).parted)
    ['ep']
    """

    cuts: tuple[tuple[str, int], ...] = ()
    summed: Names = ()
    shape: tuple[int, ...] | None = None
    matrix: tuple[int, int] | None = None
    uneven: bool = False

    @property
    def parted(self) -> frozenset[str]:
        """The axes along which ops read parts."""
        return frozenset(axis for axis, _ in self.cuts)


@dataclass(frozen=True)
class Cutting:
    """How a leaf is stored.

    Attributes:
      names: for every dim the mesh axes that cut it, largest parts first.
      padding: for every dim how many zeros are put to its end; none in those that nothing cuts.
    """

    names: tuple[Names, ...]
    padding: tuple[int, ...]

    def part_size(self, shape: Sequence[int], mesh: Mapping[str, int], *, whole: Names = ()) -> int:
        """Values on one device of a leaf of this shape, put together along the axes in `whole`.

        >>> how = Cutting((("pp",), ("dp",), ("tp",)), (0, 0, 0))
        >>> how.part_size((4, 32, 48), {"pp": 4, "dp": 2, "tp": 2})
        384
        """
        sizes = [
            size + padding * bool(set(names).difference(whole))
            for size, padding, names in zip(shape, self.padding, self.names)
        ]
        parts = prod(mesh[name] for entry in self.names for name in entry if name not in whole)
        return prod(sizes) // parts


def cutting(
    shape: Sequence[int], leaf: Leaf, mesh: Mapping[str, int], *, of_layer: bool, zero_stage: int
) -> Cutting:
    """How a leaf in stage form is cut; `shape` is without padding.

    `mesh` has the sizes of the axes; rp and ep may be left out. A layer's leaf has a leading dim of
    ranks.

    >>> mesh = {"pp": 4, "dp": 2, "tp": 2}
    >>> wide = Leaf(cuts=(("tp", 1),), shape=(32, 48))
    >>> cutting((4, 32, 48), wide, mesh, of_layer=True, zero_stage=1)
    Cutting(names=(('pp',), ('dp',), ('tp',)), padding=(0, 0, 0))
    >>> cutting((64, 32), Leaf(cuts=(("tp", 0),)), mesh, of_layer=False, zero_stage=0)
    Cutting(names=(('tp', 'pp'), ()), padding=(0, 0))
    >>> cutting((63, 32), Leaf((("tp", 0),), uneven=True), mesh, of_layer=False, zero_stage=0)
    Cutting(names=(('tp', 'pp'), ()), padding=(1, 0))
    >>> cutting((4, 4096, 1024), wide, mesh | {"dp": 6}, of_layer=True, zero_stage=1)
    Cutting(names=(('pp',), ('dp',), ('tp',)), padding=(0, 128, 0))
    >>> experts = Leaf(cuts=(("ep", 0),), shape=(8, 64, 32))
    >>> cutting((4, 8, 64, 32), experts, mesh | {"ep": 4}, of_layer=True, zero_stage=1)
    Cutting(names=(('pp',), ('ep', 'dp'), (), ()), padding=(0, 0, 0, 0))
    """
    names: list[Names] = [()] * len(shape)
    padding = [0] * len(shape)
    first = int(of_layer)
    for _, dim in leaf.cuts if leaf.uneven else ():
        parts = prod(mesh.get(axis, 1) for axis, of in leaf.cuts if of == dim)
        padding[first + dim] = -shape[first + dim] % parts
    sizes = [size + more for size, more in zip(shape, padding)]

    def divide(axes: Names, dims: Sequence[int]) -> bool:
        parts = prod(mesh.get(axis, 1) for axis in axes)
        for dim in dims:
            if sizes[dim] % parts == 0:
                sizes[dim] //= parts
                names[dim] += axes
                return True
        return False

    every = range(first, len(sizes))
    if of_layer:
        divide((PP,), [0])
    for axis, dim in leaf.cuts:
        if mesh.get(axis, 1) > 1 or axis == PP:
            divide((axis,), [first + dim])
    if not of_layer and PP not in leaf.parted:
        divide((PP,), every)
    replicas = tuple(
        axis
        for axis in reversed(SHARDS)
        if axis not in leaf.parted and (axis == DP or mesh.get(axis, 1) > 1)
    )
    parts = prod(mesh.get(axis, 1) for axis in replicas)
    if zero_stage and parts > 1 and not divide(replicas, every) and leaf.shape is not None:
        free = [dim for dim in every if not names[dim]]
        found = _least_padded(free, sizes, parts)
        if found is not None:
            dim, padding[dim] = found
            names[dim] = replicas
    return Cutting(tuple(names), tuple(padding))


def _least_padded(
    free: Sequence[int], sizes: Sequence[int], replicas: int
) -> tuple[int, int] | None:
    """The dim that replicas can cut with the least padding for its length, and that padding.

    Dims count that consist of blocks; None where a part of none would be smaller than the whole.
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
