"""Run steps of several competitors in turn, and keep those that nothing else disturbed.

A step is also discarded if it touched much new memory: a process that ran other steps in between
may have fragmented memory, and page faults then slow down a large step. A training run repeats one
step and has no such cost.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.bench.processes import ProcessGroup, machine_busy_seconds

logger = logging.getLogger(__name__)
CLEAN = 0.06  # share of a core that other processes may use during a step that is kept
FRESH = 2**28  # bytes of new memory that such a step may touch, summed over its processes


@dataclass
class Rounds:
    """Results of the undisturbed turns.

    Attributes:
        rounds: for each round, the result of every turn by name.
        tried: number of attempts by name.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)

    def kept(self, name: str) -> list[Any]:
        """Return the results of one turn, in the order of rounds."""
        return [results[name] for results in self.rounds if name in results]


@dataclass(frozen=True)
class Runner:
    """Runs competitors in turn, and repeats a turn that other processes disturbed.

    Attributes:
        groups: all processes of the measurement; CPU time of any other process is a disturbance.
        tries: most attempts at a turn in one round.
        patience: longest wait for a quiet machine before each attempt, in seconds.
    """

    groups: Sequence[ProcessGroup]
    tries: int = 3
    patience: float = 30.0

    def round(self, turns: Mapping[str, Callable[[], Any]], into: Rounds) -> None:
        """Run all turns once and append the results; a turn disturbed in every try is left out."""
        results = {}
        for name, turn in turns.items():
            for _ in range(self.tries):
                into.tried[name] += 1
                answer, own, others, fresh = self._watched(turn)
                logger.info(
                    "%s: %s, %.2f s of processor, others %.3f, %.0f MiB of new memory",
                    name, answer, own, others, fresh / 2**20,
                )  # fmt: skip
                if others < CLEAN and fresh < FRESH:
                    results[name] = answer
                    break
        into.rounds.append(results)

    def _watched(self, turn: Callable[[], Any]) -> tuple[Any, float, float, int]:
        """Return a turn's result, its CPU seconds, other processes' CPU share, new bytes touched.

        A share of 1 is one core.
        """
        self._wait()
        begin, own, others, fresh = time.monotonic(), self._own(), self._others(), self._fresh()
        answer = turn()
        seconds = time.monotonic() - begin
        others, fresh = self._others() - others, self._fresh() - fresh
        return answer, self._own() - own, others / seconds, fresh

    def _wait(self) -> None:
        """Wait until other processes use little CPU for half a second, or patience ends."""
        limit = time.monotonic() + self.patience
        while time.monotonic() < limit:
            others = self._others()
            time.sleep(0.5)
            if self._others() - others < CLEAN / 2:
                return

    def _own(self) -> float:
        return time.process_time() + sum(group.cpu_seconds() for group in self.groups)

    def _fresh(self) -> int:
        return sum(group.fresh_bytes() for group in self.groups)

    def _others(self) -> float:
        return machine_busy_seconds() - self._own()
