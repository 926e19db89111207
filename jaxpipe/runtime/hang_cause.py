"""Who holds up a run that hangs: a pure function of what all processes report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jaxpipe.runtime.activity import OWN_WORK
from jaxpipe.runtime.position import PHASES

_NAMED = 4  # processes that a sentence describes one by one


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a process publishes about itself.

    Attributes:
      process: its index.
      started: when the run was started, equal in all its processes.
      beat: number of this report.
      written: wall-clock time of this report.
      host: its host's name.
      pid: its process id there.
      place: coordinates of its devices on the mesh; "" before the mesh is made.
      phase: phase of its main thread (`position.PHASES`).
      step: step of that phase.
      number: phases that it has entered.
      age: time in this phase [s].
      limit: time after which this phase counts as stuck [s].
      finished: last step whose metrics it has read.
      waits: what it waits for (`activity`).
      where: the function that it is in.
      unanswered: time since process 0 last answered it over the network [s].
      over: whether the run has ended for this process.
    """

    process: int
    started: str
    beat: int
    written: str
    host: str
    pid: int
    place: str = ""
    phase: str
    step: int
    number: int
    age: float
    limit: float
    finished: int
    waits: int
    where: str
    unanswered: float = 0.0
    over: bool = False

    @property
    def name(self) -> str:
        """The process, its host and its coordinates."""
        place = f", {self.place}" if self.place else ""
        return f"process {self.process} (pid {self.pid} on {self.host}{place})"

    @property
    def doing(self) -> str:
        """The phase and its step."""
        return PHASES[self.phase].words + (f" (step {self.step})" if self.step else "")


class Verdict(NamedTuple):
    """The processes that hold up the run (none: all wait for each other), and a sentence on it."""

    behind: tuple[int, ...]
    sentence: str


def verdict(reports: Iterable[Report], silent: Mapping[int, float], count: int) -> Verdict | None:
    """Decide which processes hold up the run.

    In this order: processes that give no sign of life; those that have not reached process 0 over
    the network for half of the limit; those that do their own work while others wait; those that
    wait for devices while others wait for processes; those that have entered the fewest phases. If
    all are alike, none is named.

    Args:
      reports: the newest report of every process that has sent one.
      silent: seconds without a new report, by index of the processes that send none any more.
      count: number of processes of the run.

    Returns:
      None if a process that would be named is still within the limit of its phase.
    """
    known = {report.process: report for report in reports if not report.over}
    alive = [report for process, report in known.items() if process not in silent]
    finished = max((report.finished for report in known.values()), default=0)
    tail = f"last finished step: {finished}" if finished else "no step has finished"
    if silent:
        named = _listed([_silent(known.get(p), p, silent[p]) for p in sorted(silent)])
        return Verdict(tuple(sorted(silent)), f"{named}; {tail}")
    if apart := [report for report in alive if report.unanswered > report.limit / 2]:
        named = _listed([_apart(report) for report in apart])
        return Verdict(tuple(report.process for report in apart), f"{named}; {tail}")
    suspects = _smallest(alive, "waits")
    suspects = _smallest(suspects, "number")
    if not suspects or any(report.age <= report.limit for report in suspects):
        return None
    if len(suspects) == len(alive) > 1:
        first = suspects[0]
        sentence = (
            f"none of the {len(alive)} processes is behind, but all have been {first.doing} for "
            f"{first.age:.0f} s, process {first.process} in {first.where}; {tail}"
        )
        return Verdict((), sentence)
    others = f"; {count - len(suspects)} of {count} processes wait" if count > 1 else ""
    named = _listed([_stuck(report) for report in suspects])
    return Verdict(tuple(report.process for report in suspects), f"{named}{others}; {tail}")


def _smallest(reports: Sequence[Report], field: str) -> list[Report]:
    """The reports whose field has the smallest value."""
    least = min((getattr(report, field) for report in reports), default=0)
    return [report for report in reports if getattr(report, field) == least]


def _stuck(report: Report) -> str:
    verb = "is stuck" if report.waits == OWN_WORK else "is behind or its devices are stuck"
    return f"{report.name} {verb} while {report.doing}, for {report.age:.0f} s, in {report.where}"


def _apart(report: Report) -> str:
    seconds = f"{report.unanswered:.0f} s"
    return f"{report.name} runs, but has not reached process 0 over the network for {seconds}"


def _silent(report: Report | None, process: int, seconds: float) -> str:
    if report is None:
        return f"process {process} has never reported"
    return f"{report.name} gives no sign of life for {seconds:.0f} s, last seen {report.doing}"


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _NAMED
    return "; ".join(parts[:_NAMED]) + (f"; and {more} more processes" if more > 0 else "")
