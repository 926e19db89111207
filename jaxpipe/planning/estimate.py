"""What one candidate costs: time, bubbles, bytes and messages."""

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from jaxpipe.config import Config
from jaxpipe.planning.candidates import Candidate
from jaxpipe.planning.costs import costs_of
from jaxpipe.planning.hardware import NO_COPIES, NO_EXCHANGE, OpSeconds
from jaxpipe.planning.memory import RankBytes, layout_of, mirrored_bytes, rank_bytes
from jaxpipe.schedule import Report, Tables, simulate, time_saved


@dataclass(frozen=True)
class Estimate:
    """One row of a plan. Tokens are those of the whole step, over all replicas.

    The time is that of the pipeline: the gradients' sum over dp and the update come on top.
    """

    candidate: Candidate
    report: Report  # seconds
    tables: Tables
    bytes: RankBytes  # of a device
    sent: int  # bytes that a device sends in a step: every lane of every tick, and a second copy
    mirroring: float  # seconds of that copy, if the schedule is bidirectional
    waiting: float  # seconds for which compute waits for copies with the host
    exposed: float  # seconds for which it waits for other replicas, over ep and over cp
    tokens: int  # of a step
    saved: float | None = None  # share of the time that steps would save which overlap, if known

    @property
    def held(self) -> int:
        """Most (microbatch, stage) pairs on any rank."""
        return self.tables.slots.for_w

    @property
    def seconds(self) -> float:
        """Of a step: what the scan takes."""
        return self.report.scan_makespan + self.mirroring

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the whole step, over all replicas."""
        return self.tokens / self.seconds


def estimate(config: Config, candidate: Candidate, seconds: OpSeconds) -> Estimate:
    """Simulate a candidate of a configuration."""
    choice = candidate.choice
    config, tables = choice.settled(config), choice.tables

    def simulated(seconds: OpSeconds) -> Report:
        return simulate(choice.schedule, choice.costs(config, seconds), choice.lockstep)

    report = simulated(seconds)

    def more_than_with(**other: object) -> float:
        if all(getattr(seconds, name) == value for name, value in other.items()):
            return 0.0
        return report.scan_makespan - simulated(replace(seconds, **other)).scan_makespan

    message = costs_of(config).message
    layout = layout_of(config, choice.schedule.placement, choice.layers)
    mirrored = mirrored_bytes(config, layout)
    return Estimate(
        candidate,
        report,
        tables,
        rank_bytes(config, layout, tables),
        tables.ticks * len(tables.lanes) * message + mirrored,
        seconds.sending(mirrored, message),
        more_than_with(copies=NO_COPIES),
        more_than_with(exchange=NO_EXCHANGE, sharing=NO_EXCHANGE),
        config.tokens_per_step,
    )


def overlapped(config: Config, one: Estimate, seconds: OpSeconds, steps: int) -> Estimate:
    """An estimate with what so many steps that overlap would save.

    That is of the pipeline's time: updates take none, as in the rest.
    """
    choice = one.candidate.choice
    if choice.schedule.placement.mirrored_from is not None:
        return one
    costs = choice.costs(choice.settled(config), seconds)
    saved = time_saved(choice.schedule, steps, costs, choice.lockstep)
    return dataclasses.replace(one, saved=saved)
