"""Progress of long plans and searches: a line on stderr every few seconds."""

import sys
import time
from collections.abc import Callable


class PlanProgress:
    """Prints what is done, at most every `seconds`; nothing for what takes less.

    Args:
      seconds: between two lines.
      clock: gives the time [s].
    """

    def __init__(self, seconds: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._printed = seconds, clock, clock()

    def __call__(self, line: Callable[[], str]) -> None:
        """Print a line, which is only made if it is time for one."""
        now = self._clock()
        if now - self._printed >= self._seconds:
            self._printed = now
            print(line(), file=sys.stderr, flush=True)
