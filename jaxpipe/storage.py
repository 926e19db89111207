"""The rule by which leaves are cut over the mesh: plain arithmetic, for storing and for planning.

Layers are on the ranks of their stages; a parameter is cut over tp as its model says, and what
outlives a step over dp from ZeRO stage 1 on (Rajbhandari et al. 2020): along the first axis that dp
divides, not at all where there is none. Shared leaves are cut over pp in the same way, or, where
every rank uses its own part of the vocabulary, along the axis that tp cuts.
"""

from collections.abc import Mapping, Sequence
from math import prod

from jaxpipe.tensor import Cut

Names = tuple[str, ...]


def cutting(
    shape: Sequence[int],
    cut: Cut,
    mesh: Mapping[str, int],
    *,
    of_layer: bool,
    zero_stage: int,
    vocab_parallel: bool = False,
) -> tuple[Names, ...]:
    """For every axis of a leaf in stage form the mesh axes that cut it, largest parts first.

    `mesh` has the sizes of `pp`, `dp` and `tp`. A layer's leaf has a leading axis of ranks.

    >>> mesh = {"pp": 4, "dp": 2, "tp": 2}
    >>> cutting((4, 32, 48), Cut(1), mesh, of_layer=True, zero_stage=1)
    (('pp',), ('dp',), ('tp',))
    >>> cutting((64, 32), Cut(0), mesh, of_layer=False, zero_stage=0)
    (('tp', 'pp'), ())
    """
    names: list[Names] = [()] * len(shape)
    sizes = list(shape)
    first = int(of_layer)

    def divide(name: str, axes: range) -> None:
        for axis in axes:
            if sizes[axis] % mesh[name] == 0:
                sizes[axis] //= mesh[name]
                names[axis] += (name,)
                return

    every = over_pp = range(first, len(sizes))
    if cut.axis is not None:
        along = range(first + cut.axis, first + cut.axis + 1)
        if mesh["tp"] > 1:
            divide("tp", along)
        over_pp = along if vocab_parallel else every
    divide("pp", range(1) if of_layer else over_pp)
    if zero_stage and mesh["dp"] > 1:
        divide("dp", every)
    return tuple(names)


def part_size(
    shape: Sequence[int], names: Sequence[Names], mesh: Mapping[str, int], *, whole: Names = ()
) -> int:
    """Values of a leaf on one device, if it is put together along the axes in `whole`."""
    parts = prod(mesh[name] for entry in names for name in entry if name not in whole)
    return prod(shape) // parts
