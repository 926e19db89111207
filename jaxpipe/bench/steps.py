"""Steps of several competitors in turn, kept only where nothing else was using the machine."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from jaxpipe.bench.processes import Group, machine_busy_seconds

CLEAN = 0.06  # of a core that others may use during a step that is kept


@dataclass
class Series:
    """What one kind of step took, in seconds, clean ones only; `made` counts all."""

    kept: list[float] = field(default_factory=list)
    made: int = 0

    @property
    def median(self) -> float:
        """Seconds; NaN where no step was clean."""
        return median(self.kept) if self.kept else float("nan")

    def summary(self) -> dict[str, Any]:
        """For the results file."""
        return {"seconds": [round(s, 4) for s in self.kept], "kept": len(self.kept),
                "made": self.made}  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """Takes turns between competitors; a step that others disturbed is tried again.

    `groups` are all processes of the measurement, whose processor time is not others'. `tries` is
    how often a step is made until one is clean, `patience` the longest wait for a quiet machine
    before each, in seconds.
    """

    groups: Sequence[Group]
    tries: int = 3
    patience: float = 20.0

    def rounds(
        self, count: int, turns: dict[str, Callable[[], Any]], series: dict[str, Series]
    ) -> Iterable[dict[str, Any]]:
        """`count` rounds through all turns; yields what the clean turns of each round answered."""
        for _ in range(count):
            yield {
                name: answer
                for name, turn in turns.items()
                if (answer := self._clean(turn, series[name])) is not None
            }

    def _clean(self, turn: Callable[[], Any], series: Series) -> Any:
        for _ in range(self.tries):
            self.wait()
            begin, others = time.monotonic(), self._others()
            answer = turn()
            share = (self._others() - others) / (time.monotonic() - begin)
            series.made += 1
            if share < CLEAN:
                if isinstance(answer, float):
                    series.kept.append(answer)
                return answer
        return None

    def wait(self) -> None:
        """Until others use little for half a second, or patience ends."""
        limit = time.monotonic() + self.patience
        while time.monotonic() < limit:
            others = self._others()
            time.sleep(0.5)
            if self._others() - others < CLEAN / 2:
                return

    def _others(self) -> float:
        return machine_busy_seconds() - sum(g.cpu_seconds() for g in self.groups) - _own()


def _own() -> float:
    return time.process_time()
