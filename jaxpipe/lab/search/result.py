"""What a search of layouts finds."""

import bisect
from dataclasses import dataclass, replace

from jaxpipe.config import Config
from jaxpipe.planning.cost.estimate import Estimate, estimate
from jaxpipe.planning.resolve import RunPlan

# Position in the space: of a mesh, a shape of it, a schedule on it.
Number = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Found:
    """A configuration with what it needs.

    They are in order of preference: of equally fast ones the one that offloads less, then the one
    that needs less memory.

    Attributes:
      seconds: of a step, to nine digits: sums in another order are equal.
      offloaded: layers of a stage whose residuals are on the host, and 1 more for moments.
      bytes: of a device.
      number: position in the space (mesh, shape, schedule), which decides between equals.
      plan: with the seconds of ops by which it was simulated.
    """

    seconds: float
    offloaded: int
    bytes: int
    number: Number
    plan: RunPlan

    @property
    def layout(self) -> tuple[str, str]:
        """The mesh and the schedule; one pipeline rank does the same in any."""
        parallel = self.plan.config.parallel
        return parallel.mesh, parallel.schedule if parallel.pp > 1 else ""

    def estimate(self) -> Estimate:
        """The estimate that a plan's table shows."""
        return replace(estimate(self.plan), configured=True)


@dataclass
class SearchResult:
    """The best of a search, and how much it looked at.

    Attributes:
      best: the fastest of every schedule on every mesh, the fastest first.
      candidates: schedules that may fit, whose time was bounded.
      simulated: those that were simulated.
      least: the smallest memory that anything was found to need, and its configuration.
    """

    best: list[Found]
    candidates: int = 0
    simulated: int = 0
    least: tuple[float, Config] | None = None

    def add(self, one: Found, keep: int) -> None:
        """Add a configuration if it is the best of its layout, and remove all but `keep`."""
        for other in self.best:
            if other.layout == one.layout:
                if other < one:
                    return
                self.best.remove(other)
                break
        bisect.insort(self.best, one)
        del self.best[keep:]

    def note(self, size: float, config: Config) -> None:
        """Remember the configuration that needs least memory."""
        if self.least is None or size < self.least[0]:
            self.least = size, config
