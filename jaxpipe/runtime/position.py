"""The phase and step that this process's main thread is in, which the watchdog compares and times.

The main thread only stores one tuple per phase. All processes of a run enter the same phases in the
same order, so the number of phases entered so far says which process is behind.
"""

import statistics
import time
from collections import deque
from typing import Literal, NamedTuple

Timeout = float | Literal["auto"]  # of `runtime.hang_timeout`


class Phase(NamedTuple):
    """A kind of work of the main thread.

    Attributes:
      words: as in "it is stuck while ...".
      least: lower bound on the phase's time limit [s].
      least_auto: lower bound where `runtime.hang_timeout` is "auto" [s].
    """

    words: str
    least: float = 0.0
    least_auto: float = 0.0


PHASES = {
    "start": Phase("starting", 1800, 1800),
    "restore": Phase("restoring or initializing the state", 1800, 1800),
    "compile": Phase("compiling", 1800, 1800),
    "data": Phase("loading a batch"),
    "step": Phase("running a step"),
    "evaluate": Phase("computing the held-out loss"),
    "score": Phase("scoring tokens", 1800, 1800),  # new lengths compile
    "check": Phase("checking a step for corruption", 600, 600),
    "profile": Phase("writing a profile", 600, 600),
    "save": Phase("saving", 0, 600),
    "export": Phase("waiting for an export", 1800, 1800),
}
_AUTO_SECONDS = 60.0  # smallest limit where `runtime.hang_timeout` is "auto"
_AUTO_STEPS = 5.0  # the limit in median steps, if that is larger
# Before a step has finished its time is unknown, and NCCL may still connect thousands of devices.
_AUTO_FIRST_SECONDS = 600.0
_RECENT = 64  # programs whose median time counts


class Position(NamedTuple):
    """What the main thread does.

    Attributes:
      phase: a key of `PHASES`.
      step: the step that the phase belongs to; 0 before the first.
      number: phases entered so far.
      since: `time.monotonic()` when the phase was entered [s].
    """

    phase: str
    step: int
    number: int
    since: float


class Finished(NamedTuple):
    """The step read last (0: none), and the times of recent programs [s]."""

    step: int
    seconds: deque[float]


now = Position("start", 0, 0, time.monotonic())
finished = Finished(0, deque(maxlen=_RECENT))


def enter(phase: str, step: int | None = None) -> None:
    """Note that the main thread enters a phase, of the step before if none is given."""
    global now
    now = Position(phase, now.step if step is None else step, now.number + 1, time.monotonic())


def finish(step: int, seconds: float) -> None:
    """Note that a step has finished, whose program took this time [s]."""
    global finished
    finished.seconds.append(seconds)
    finished = Finished(step, finished.seconds)


def restart() -> None:
    """Begin a new run, in the phase `start`."""
    global now, finished
    now, finished = Position("start", 0, 0, time.monotonic()), Finished(0, deque(maxlen=_RECENT))


def limit(timeout: Timeout, phase: str) -> float:
    """The time [s] after which a phase counts as stuck, with this `runtime.hang_timeout`."""
    about = PHASES[phase]
    if timeout != "auto":
        return max(timeout, about.least)
    if not (seconds := finished.seconds.copy()):
        return max(_AUTO_FIRST_SECONDS, about.least_auto)
    return max(_AUTO_SECONDS, _AUTO_STEPS * statistics.median(seconds), about.least_auto)
