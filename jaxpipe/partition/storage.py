"""The rule by which leaves are cut over the mesh: plain arithmetic, for storing and for planning.

Layers are on the ranks of their stages; a parameter is cut over tp as its model says, and what
outlives a step over dp from ZeRO stage 1 on (Rajbhandari et al. 2020): along the first axis that dp
divides, or else along one that nothing else cuts, in blocks of 32 and padded with zeros. Shared
leaves are cut over pp along the first axis that it divides, or, where every rank uses its own part
of the vocabulary, along the axis that tp cuts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from jaxpipe.partition.devices import Cut

Names = tuple[str, ...]
_BLOCK = 32  # values along a padded axis, of which every replica has whole blocks


@dataclass(frozen=True)
class Cutting:
    """`names`: for every axis of a leaf the mesh axes that cut it, largest parts first.

    `padding`: how many zeros are put to the end of the axis that dp cuts.
    """

    names: tuple[Names, ...]
    padding: int = 0

    def part_size(self, shape: Sequence[int], mesh: Mapping[str, int], *, whole: Names = ()) -> int:
        """Values on one device of a leaf of this shape, put together along the axes in `whole`."""
        padded = 0 if "dp" in whole else self.padding
        sizes = [size + padded * ("dp" in names) for size, names in zip(shape, self.names)]
        parts = prod(mesh[name] for entry in self.names for name in entry if name not in whole)
        return prod(sizes) // parts


def cutting(
    shape: Sequence[int],
    cut: Cut,
    mesh: Mapping[str, int],
    *,
    of_layer: bool,
    zero_stage: int,
    vocab_parallel: bool = False,
    may_pad: bool = True,
) -> Cutting:
    """How a leaf in stage form is cut; `shape` is without padding.

    `mesh` has the sizes of `pp`, `dp` and `tp`. A layer's leaf has a leading axis of ranks.

    >>> mesh = {"pp": 4, "dp": 2, "tp": 2}
    >>> cutting((4, 32, 48), Cut(1), mesh, of_layer=True, zero_stage=1)
    Cutting(names=(('pp',), ('dp',), ('tp',)), padding=0)
    >>> cutting((64, 32), Cut(0), mesh, of_layer=False, zero_stage=0)
    Cutting(names=(('tp', 'pp'), ()), padding=0)
    >>> cutting((4, 4096, 1024), Cut(1), mesh | {"dp": 6}, of_layer=True, zero_stage=1)
    Cutting(names=(('pp',), ('dp',), ('tp',)), padding=128)
    """
    names: list[Names] = [()] * len(shape)
    sizes = list(shape)
    first = int(of_layer)

    def divide(name: str, axes: range) -> bool:
        for axis in axes:
            if sizes[axis] % mesh[name] == 0:
                sizes[axis] //= mesh[name]
                names[axis] += (name,)
                return True
        return False

    every = over_pp = range(first, len(sizes))
    if cut.axis is not None:
        along = range(first + cut.axis, first + cut.axis + 1)
        if mesh["tp"] > 1:
            divide("tp", along)
        over_pp = along if vocab_parallel else every
    divide("pp", range(1) if of_layer else over_pp)
    padding = 0
    if zero_stage and mesh["dp"] > 1 and not divide("dp", every) and may_pad:
        free = [axis for axis in every if not names[axis]]
        padding = _pad(free, sizes, names, mesh["dp"])
    return Cutting(tuple(names), padding)


def _pad(free: Sequence[int], sizes: Sequence[int], names: list[Names], dp: int) -> int:
    """Let dp cut that of the axes which needs the least padding for its length; how much it is.

    Axes count that consist of blocks; 0 where a part of none would be smaller than the whole.
    """
    parts = {
        axis: -(-sizes[axis] // (dp * _BLOCK)) * _BLOCK
        for axis in free
        if sizes[axis] % _BLOCK == 0
    }
    smaller = [axis for axis, part in parts.items() if part < sizes[axis]]
    if not smaller:
        return 0
    best = min(smaller, key=lambda axis: parts[axis] / sizes[axis])
    names[best] = ("dp",)
    return dp * parts[best] - sizes[best]
