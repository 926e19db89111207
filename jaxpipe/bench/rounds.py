"""Run a step again until nothing else has disturbed it.

A step is also discarded if it touched much new memory: a process that ran other steps in between
may have fragmented memory, and page faults then slow down a large step. A training run repeats one
step and has no such cost.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpipe.bench.processes import ProcessGroup, machine_busy_seconds

logger = logging.getLogger(__name__)
CLEAN = 0.06  # share of a core that other processes may use during a step that is kept
FRESH = 2**28  # bytes of new memory that such a step may touch, summed over its processes


class _Counters(NamedTuple):
    """Time, CPU seconds of other processes, and memory touched [bytes], each since its own zero."""

    now: float
    others: float
    fresh: int


@dataclass(frozen=True)
class Runner:
    """Repeats what other processes disturbed.

    Attributes:
        groups: all processes of the measurement; CPU time of any other process is a disturbance.
        patience: longest wait for a quiet machine before each attempt [s].
        tries: largest number of attempts.
    """

    groups: Sequence[ProcessGroup]
    patience: float = 30.0
    tries: int = 3

    def run(self, name: str, step: Callable[[], Any]) -> Any:
        """Return the result of an undisturbed run of `step`; None: every attempt was disturbed."""
        for _ in range(self.tries):
            self._wait()
            before = self._counters()
            result = step()
            now, others, fresh = (b - a for a, b in zip(before, self._counters()))
            logger.info(
                "%s: %s; others %.3f, %.0f MiB of new memory",
                name, result, others / now, fresh / 2**20,
            )  # fmt: skip
            if others / now < CLEAN and fresh < FRESH:
                return result
        return None

    def _wait(self) -> None:
        """Wait until other processes use little CPU for half a second, or patience ends."""
        limit = time.monotonic() + self.patience
        while time.monotonic() < limit:
            before = self._counters()
            time.sleep(0.5)
            if self._counters().others - before.others < CLEAN / 2:
                return

    def _counters(self) -> _Counters:
        own = time.process_time() + sum(group.cpu_seconds() for group in self.groups)
        fresh = sum(group.fresh_bytes() for group in self.groups)
        return _Counters(time.monotonic(), machine_busy_seconds() - own, fresh)
