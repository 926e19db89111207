"""Estimates of what candidates cost: time, bubbles, bytes and messages."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from msgspec.structs import replace

from jaxpipe.config import Config
from jaxpipe.planning.candidates import Candidate, tried, variants
from jaxpipe.planning.chosen import ends_of
from jaxpipe.planning.costs import ModelCosts, costs_of, essentials, take_traced
from jaxpipe.planning.hardware import NO_COPIES, NO_EXCHANGE, OpSeconds
from jaxpipe.planning.memory import RankBytes, layout_of, mirrored_bytes, rank_bytes
from jaxpipe.schedule import (
    FAMILIES,
    ScheduleVariant,
    SimulationReport,
    Tables,
    fusion_gain,
    simulate,
)


@dataclass(frozen=True)
class Estimate:
    """What a candidate costs: one row of a plan. Tokens are those of all replicas.

    Times are those of the pipeline, without the reduction of gradients over dp and the optimizer
    update.
    """

    candidate: Candidate
    report: SimulationReport  # simulated times, in seconds
    tables: Tables
    bytes: RankBytes  # of a device
    sent: int  # bytes that a device sends per step: messages, and mirrored stages
    mirroring: float  # seconds to send the mirrored stages of a bidirectional schedule; else 0
    waiting: float  # seconds per step for which compute waits for copies with the host
    exposed: float  # seconds per step for which compute waits for replicas, over ep and cp
    tokens: int  # per step
    saved: float | None = None  # share of the time that overlapping steps would save; None: unknown

    @property
    def held(self) -> int:
        """Most live (microbatch, stage) pairs on any rank."""
        return self.tables.slots.for_w

    @property
    def seconds(self) -> float:
        """Seconds of a step: of the scan, and of mirroring."""
        return self.report.scan_makespan + self.mirroring

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all replicas."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class _Request:
    """An estimate for another process to compute, which does not trace again what is `known`."""

    config: Config
    seconds: OpSeconds
    memory: float | None
    known: Mapping[Config, ModelCosts]

    def __call__(self, variant: ScheduleVariant) -> Estimate | str:
        """Return the estimate of a variant, or the reason why the sizes forbid it."""
        take_traced(self.known)
        one = tried(self.config, self.seconds, variant, memory=self.memory)
        return one if isinstance(one, str) else estimate(self.config, one, self.seconds)


def estimates(
    config: Config,
    seconds: OpSeconds,
    *,
    memory: float | None = None,
    helpers: Executor | None = None,
) -> tuple[list[Estimate], dict[str, str]]:
    """Return the estimates of all schedules that fit the sizes, and by label why others do not.

    The configuration's own schedule comes first.

    Args:
      config: of the run.
      seconds: costs of ops.
      memory: bytes of a device, as in `chosen`.
      helpers: processes that compute the estimates (`planning.helpers`); None: this process does.
    """
    every = variants(config)
    known = {essentials(one): costs_of(one) for one in ends_of(config)} if helpers else {}
    request = _Request(config, seconds, memory, known)
    if helpers:
        longest_first = sorted(every, key=lambda variant: not FAMILIES[variant.family].is_searched)
        made = dict(zip(longest_first, helpers.map(request, longest_first)))
    else:
        made = {variant: request(variant) for variant in every}
    found, refused = [], {}
    for variant in every:
        if isinstance(one := made[variant], str):
            refused[variant.label] = one
        else:
            found.append(one)
    return found, refused


def estimate(config: Config, candidate: Candidate, seconds: OpSeconds) -> Estimate:
    """Simulate a candidate of a configuration."""
    choice = candidate.choice
    config, tables = choice.settled(config), choice.tables

    def simulated(seconds: OpSeconds) -> SimulationReport:
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
    """Return the estimate with the share of time that `steps` overlapping steps would save.

    The share is one of the pipeline's time, in which updates take none. A bidirectional schedule's
    estimate is returned as it is.
    """
    choice = one.candidate.choice
    if choice.schedule.placement.mirrored_from is not None:
        return one
    costs = choice.costs(choice.settled(config), seconds)
    saved = fusion_gain(choice.schedule, steps, costs, choice.lockstep)
    return dataclasses.replace(one, saved=saved)
