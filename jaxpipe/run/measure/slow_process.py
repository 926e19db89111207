"""From the reports of all processes to a sentence about the one that slows the run."""

from collections.abc import Callable, Sequence
from statistics import median, mode
from typing import NamedTuple

import msgspec

from jaxpipe.schedules.timing.lost_time import ALL, LINK, LostTime, RankSeconds

_SHARE = 0.05  # of a step's time: what costs less is not named
_STEPS = 20  # what lasts for no more steps is not named


class StragglerWindow(msgspec.Struct):
    """What one process has measured in a few consecutive steps.

    Attributes:
      number: of the window.
      name: host and mesh coordinates of the process.
      steps: steps in the window.
      step: the last of them.
      counted: steps in whose times no process did something else, such as a save.
      seconds: mean time of a counted step [s].
      data: mean time in which devices waited for this process's data loader [s].
      host: mean time in which devices waited for other work of this process's host [s].
      ops: times of ops by "pipeline rank/replica", if a step was recorded.
    """

    number: int
    name: str
    steps: int = 0
    step: int = 0
    counted: int = 0
    seconds: float = 0.0
    data: float = 0.0
    host: float = 0.0
    ops: dict[str, RankSeconds] = {}

    def add(self, before: float, asked: float, dispatched: float, done: float, steps: int) -> None:
        """Add the steps of a program.

        Args:
          before: when the program before it had ended [s].
          asked: when its batch was asked for.
          dispatched: when it was dispatched.
          done: when it had ended.
          steps: number of its steps.
        """
        asked = max(asked, before)
        total = self.counted + steps
        for name, seconds in (
            ("seconds", done - before),
            ("data", max(dispatched - asked, 0)),
            ("host", asked - before),
        ):
            mean = (getattr(self, name) * self.counted + seconds) / total
            setattr(self, name, mean)
        self.counted = total


class Finding(NamedTuple):
    """What costs most: the process, the cause in words, and the lost time of a step [s]."""

    process: int
    name: str
    words: str
    lost: float


def find_process(
    windows: Sequence[StragglerWindow], cost: Callable[[int, float], float]
) -> Finding:
    """The process whose host makes its devices wait most, compared with the others' median.

    Args:
      windows: of every process, in order; at least two.
      cost: the time that a step loses if the devices of a process start so late [s].
    """
    words = {
        "data": "its devices wait for its data loader",
        "host": "its devices wait for its host",
    }

    def excess(process: int, cause: str) -> float:
        others = [getattr(each, cause) for i, each in enumerate(windows) if i != process]
        return getattr(windows[process], cause) - median(others)

    both = [(p, cause) for p in range(len(windows)) for cause in words]
    process, cause = max(both, key=lambda each: excess(*each))
    lost = cost(process, max(excess(process, cause), 0.0))
    return Finding(process, windows[process].name, words[cause], lost)


def find_op(lost: LostTime, window: StragglerWindow, process: int) -> Finding:
    """The finding about an op or a link of a recorded step."""
    if lost.cause == LINK:
        words = f"the link between pipeline ranks {lost.pp_rank} and {lost.pp_rank + 1} is slow"
    else:
        what = "every op" if lost.cause == ALL else f"the op {lost.cause}"
        words = f"{what} of pipeline rank {lost.pp_rank} takes longer than that of its peers"
    return Finding(process, window.name, words, lost.seconds)


class _Judged(NamedTuple):
    """A window: its worst process, the time of a step [s] and the first of its steps."""

    finding: Finding
    seconds: float
    first: int


class Blame:
    """Names what costs more than 5 % of every step for more than 20 steps, once, and its end.

    Times are noisy. Therefore the median of the last windows counts, in all of which this process
    was the worst and cost at least half as much, and of several causes the most frequent one.
    """

    def __init__(self) -> None:
        self._row: list[_Judged] = []
        self._named: Finding | None = None

    def add(self, worst: Finding, seconds: float, first: int, last: int) -> str | None:
        """The sentence to print after the steps `first` to `last`, each of which took `seconds`."""
        before, is_worst = self._row, worst.lost > _SHARE / 2 * seconds
        same = before and before[-1].finding.process == worst.process
        self._row = [*(before if same else []), _Judged(worst, seconds, first)] if is_worst else []
        while len(self._row) > 1 and last - self._row[1].first >= _STEPS:
            del self._row[0]
        if (named := self._named) and not (is_worst and same):
            self._named = None
            return f"process {named.process} no longer slows the steps: {named.words} no more"
        if named or not self._row or last - self._row[0].first < _STEPS:
            return None
        lost = median(each.finding.lost for each in self._row)
        step = median(each.seconds for each in self._row)
        if lost <= _SHARE * step:
            return None
        self._named = worst._replace(words=mode(each.finding.words for each in self._row))
        return (
            f"process {worst.process} ({worst.name}) slows the steps since step "
            f"{self._row[0].first}: {self._named.words}, which costs {lost:.3f} of {step:.3f} s a "
            f"step ({lost / step:.0%})"
        )
