"""Steps of several competitors in turn, kept only where nothing else was using the machine.

A process that ran other steps meanwhile may have its memory in pieces, and take new memory for a
step that needs much; a training run, which makes the same step again and again, does not. So a step
that touched much new memory is not kept either.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.bench.processes import Group, machine_busy_seconds

logger = logging.getLogger(__name__)
CLEAN = 0.06  # of a core that others may use during a step that is kept
FRESH = 2**28  # bytes of new memory that it may touch, all processes together


@dataclass
class Rounds:
    """What every clean turn answered, round by round, and how often each was tried."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)

    def kept(self, name: str) -> list[Any]:
        """The answers of one turn."""
        return [found[name] for found in self.rounds if name in found]


@dataclass(frozen=True)
class Runner:
    """Takes turns between competitors; a turn that others disturbed is tried again.

    `groups` are all processes of the measurement, whose processor time is not others'. `tries` is
    how often a turn is made until one is clean, `patience` the longest wait for a quiet machine
    before each, in seconds.
    """

    groups: Sequence[Group]
    tries: int = 3
    patience: float = 30.0

    def round(self, turns: Mapping[str, Callable[[], Any]], into: Rounds) -> None:
        """One more round through all turns; those that were never clean are missing in it."""
        found = {}
        for name, turn in turns.items():
            for _ in range(self.tries):
                into.tried[name] += 1
                answer, own, others, fresh = self._watched(turn)
                logger.info(
                    "%s: %s, %.2f s of processor, others %.3f, %.0f MiB of new memory",
                    name, answer, own, others, fresh / 2**20,
                )  # fmt: skip
                if others < CLEAN and fresh < FRESH:
                    found[name] = answer
                    break
        into.rounds.append(found)

    def _watched(self, turn: Callable[[], Any]) -> tuple[Any, float, float, int]:
        """A turn's answer; its processor seconds, others' use of a core (1: all), new memory."""
        self._wait()
        begin, own, others, fresh = time.monotonic(), self._own(), self._others(), self._fresh()
        answer = turn()
        seconds = time.monotonic() - begin
        others, fresh = self._others() - others, self._fresh() - fresh
        return answer, self._own() - own, others / seconds, fresh

    def _wait(self) -> None:
        """Until others use little for half a second, or patience ends."""
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
