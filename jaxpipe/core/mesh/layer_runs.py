"""Ring groups: which ring slots share stacked ring buffers, since a loop runs over their layers."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.core.mesh import StageLayout


class Run(NamedTuple):
    """Layer slots of a chunk that one loop executes.

    Attributes:
      slots: their indices among the layer slots of a pipeline rank.
      group: index of the ring group whose ring buffers they use.
      first: index of the first of them within the ring group.
    """

    slots: range
    group: int
    first: int


class RingGroup(NamedTuple):
    """Ring slots that share ring buffers.

    Attributes:
      kind: the kind of their layers.
      layers: number of ring slots.
      on_host: their residuals are stored in host memory.
    """

    kind: str
    layers: int
    on_host: bool


@dataclass(frozen=True)
class LayerRuns:
    """The runs of a pipeline rank, and its ring slots in groups.

    Attributes:
      chunks: the runs of every chunk, in the order of its layers.
      groups: the ring groups.
    """

    chunks: tuple[tuple[Run, ...], ...]
    groups: tuple[RingGroup, ...]

    @classmethod
    def of(cls, layout: StageLayout, offloaded: int = 0) -> "LayerRuns":
        """Group the ring slots of a layout: all of a kind in one group if a loop runs over some.

        `offloaded` layers at the start of every chunk have their residuals in host memory.

        >>> runs = LayerRuns.of(StageLayout((5, 4), kinds=("a", *"bbbb", *"bbbb"), unroll=2))
        >>> [(run.slots, run.group, run.first) for run in runs.chunks[0]]
        [(range(0, 1), 0, 0), (range(1, 5), 1, 0)]
        >>> [tuple(group) for group in runs.groups]
        [('a', 1, False), ('b', 4, False)]
        """
        kinds, away = layout.slot_kinds, layout.first_ring_slots(offloaded)
        looped = {kinds[run.start] for run in layout.runs if len(run) > 1}
        groups: list[RingGroup] = []
        home = []  # of every ring slot: its group, and its index there
        for ring, kind in enumerate(layout.ring_slot_kinds):
            if kind in looped and groups and groups[-1].kind == kind:
                groups[-1] = groups[-1]._replace(layers=groups[-1].layers + 1)
            else:
                groups.append(RingGroup(kind, 1, ring in away))
            home.append((len(groups) - 1, groups[-1].layers - 1))
        chunks = []
        for chunk, runs in enumerate(layout.chunk_runs):
            rings, start = layout.ring_slots_of(chunk), runs[0].start if runs else 0
            chunks.append(tuple(Run(run, *home[rings[run.start - start]]) for run in runs))
        return cls(tuple(chunks), tuple(groups))
