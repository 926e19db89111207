"""The phase and step that this process's main thread is in, which the watchdog compares and times.

The main thread only stores one tuple per phase. All processes of a run enter the same phases in the
same order, so the number of phases entered so far says which process is behind.
"""

import contextlib
import math
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Timeout = float | Literal["auto"]  # of `runtime.hang_timeout`


class Phase(NamedTuple):
    """A kind of work of the main thread.

    Attributes:
      words: as in "it is stuck while ...".
      least: lower bound on the phase's time limit, which is of no progress (`beat`) [s].
      least_auto: lower bound where `runtime.hang_timeout` is "auto" [s].
    """

    words: str
    least: float = 0.0
    least_auto: float = 0.0


PHASES = {
    "import": Phase("importing packages", 1800, 1800),
    "plan": Phase("resolving its configuration", 1800, 1800),
    "devices": Phase("starting devices and processes", 1800, 1800),
    "open": Phase("opening data and checkpoints", 600, 600),
    "restore": Phase("restoring or initializing the state", 600, 600),
    "trace": Phase("tracing a program", 1800, 1800),
    "compile": Phase("compiling", 1800, 1800),
    "data": Phase("loading a batch"),
    "step": Phase("running a step"),
    "evaluate": Phase("computing the held-out loss"),
    "tasks": Phase("preparing tasks of lm-eval", 1800, 1800),  # which may be downloaded
    "score": Phase("scoring tokens", 600, 600),  # new lengths are traced
    "check": Phase("checking a step for corruption", 600, 600),
    "profile": Phase("writing a profile", 600, 600),
    "save": Phase("saving", 0, 600),
    "export": Phase("waiting for an export", 600, 600),
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


def _start_of_process() -> float:
    """When the process was started, by `time.monotonic()`; now where the system does not say."""
    stat, now = Path("/proc/self/stat"), time.monotonic()
    if not stat.exists():
        return now
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since the machine was booted
    return now - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


now = Position("import", 0, 0, _start_of_process())
spent: defaultdict[str, float] = defaultdict(float)  # time in phases that were left [s]
finished = Finished(0, deque(maxlen=_RECENT))
moved = -math.inf  # `time.monotonic()` of the last `beat` [s]
meter: Callable[[], object] | None = None  # see `metered`


def enter(phase: str, step: int | None = None) -> None:
    """Note that the main thread enters a phase, of the step before if none is given."""
    global now
    before, since = now, time.monotonic()
    spent[before.phase] += since - before.since
    now = Position(phase, before.step if step is None else step, before.number + 1, since)


def beat() -> None:
    """Note progress within the phase: bytes moved, a file was finished, or a token was made.

    The limits of phases are of no progress. Any thread may call it that does what the main thread
    waits for, but none that also works while nothing else moves.
    """
    global moved
    moved = time.monotonic()


@contextlib.contextmanager
def metered(measure: Callable[[], object]) -> Iterator[None]:
    """While the body runs, take a change of `measure()` for progress.

    The watchdog calls it, in a thread of its own, while nothing else shows progress.
    """
    global meter
    before, meter = meter, measure
    try:
        yield
    finally:
        meter = before


def finish(step: int, seconds: float) -> None:
    """Note that a step has finished, whose program took this time [s]."""
    global finished
    finished.seconds.append(seconds)
    finished = Finished(step, finished.seconds)


def restart() -> None:
    """Begin a run, in the phase `import`: the first of a process began with the process."""
    global now, finished
    since = time.monotonic() if now.number else now.since
    now, finished = Position("import", 0, 0, since), Finished(0, deque(maxlen=_RECENT))
    spent.clear()


def seconds_by_phase() -> dict[str, float]:
    """The time since the start of the run by phase [s], in the order of the phases."""
    so_far = spent.get(now.phase, 0.0) + time.monotonic() - now.since
    every = {**spent, now.phase: so_far}
    return {phase: every[phase] for phase in PHASES if every.get(phase)}


def describe_start(seconds: dict[str, float]) -> str:
    """The message on the time from the command to the end of the first step, by phase [s]."""
    listed = ", ".join(f"{phase} {duration:.1f}" for phase, duration in seconds.items())
    return f"first step after {sum(seconds.values()):.1f} s: {listed}"


def limit(timeout: Timeout, phase: str) -> float:
    """The time [s] after which a phase counts as stuck, with this `runtime.hang_timeout`."""
    about = PHASES[phase]
    if timeout != "auto":
        return max(timeout, about.least)
    if not (seconds := finished.seconds.copy()):
        return max(_AUTO_FIRST_SECONDS, about.least_auto)
    return max(_AUTO_SECONDS, _AUTO_STEPS * statistics.median(seconds), about.least_auto)
