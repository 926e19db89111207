"""The loops over layers that a smaller run keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jaxpipe.planning import RunPlan

_MOST_UNROLLED = 2  # layers in one iteration
_MOST_STAGES = 2  # with more stages, the layers of longer iterations compile too slowly


@dataclass(frozen=True)
class SmallerLoops:
    """Loops over layers that a smaller run keeps: two iterations, and a last layer behind them.

    Attributes:
      layers: least layers of a loop by kind of layer; a kind without a loop has no entry.
      unroll: layers in one iteration.
      given: `parallel.unroll_layers` of the run.
    """

    layers: Mapping[str, int]
    unroll: int
    given: int

    @classmethod
    def of(cls, plan: RunPlan) -> "SmallerLoops":
        """The loops that are kept of a run."""
        given, is_short = plan.config.parallel.unroll_layers, plan.schedule.stages <= _MOST_STAGES
        unroll = min(given or 1, _MOST_UNROLLED if is_short else 1)
        longest = longest_loops(plan).items()
        return cls({kind: min(layers, 2 * unroll + 1) for kind, layers in longest}, unroll, given)

    @property
    def most(self) -> int:
        """Layers in a row that the longest of the loops needs; 1: there is none."""
        return max(self.layers.values(), default=1)

    def unroll_layers(self, layers: int) -> int:
        """Return `parallel.unroll_layers` of a smaller run with this many layers.

        A run that unrolls all its layers still does, however the smaller run's stages divide them.
        """
        if self.layers:
            return self.unroll
        return self.given and max(self.given, layers)

    def lost_kinds(self, smaller: RunPlan) -> list[str]:
        """The kinds of layers over which a smaller run has no loop, or too short a one."""
        found = longest_loops(smaller)
        return [kind for kind, layers in self.layers.items() if found.get(kind, 0) < layers]

    def unchecked(self, smaller: RunPlan) -> Iterator[str]:
        """Yield what a smaller run does not show of the loops, each with the reason."""
        if self.layers and self.unroll == 1 < self.given:
            yield (
                f"loops with parallel.unroll_layers={self.given} layers per iteration: the "
                f"reference compiles long with more than {_MOST_STAGES} stages; 1 instead"
            )
        for kind in self.lost_kinds(smaller):
            yield (
                f"the loop over layers of kind {kind!r}: the smaller run has fewer than "
                f"{self.layers[kind]} of them in a row"
            )


def longest_loops(plan: RunPlan) -> dict[str, int]:
    """Return the layers of the longest loop over each kind; a kind without a loop has no entry."""
    layout = replace(plan.layout, unroll=plan.unroll_layers)
    loops: dict[str, int] = {}
    for run in layout.runs:
        if len(run) > 1:
            kind = layout.slot_kinds[run.start]
            loops[kind] = max(loops.get(kind, 0), len(run))
    return loops
