"""Estimates of what candidates cost: time, bubbles, bytes and messages."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from jaxpipe.config import Config
from jaxpipe.core.schedule import ScheduleError, SimulationReport, simulate
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.planning.candidates import arrange_variant, variant_of, variants
from jaxpipe.planning.cost.compute import update_bytes
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import NO_COPIES, NO_EXCHANGE, OpSeconds
from jaxpipe.planning.cost.memory import RankBytes
from jaxpipe.planning.cost.parameter_traffic import mirrored_bytes, step_traffic
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.resolve import RunPlan
from jaxpipe.schedules import FAMILIES, ScheduleVariant, fusion_gain

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout


@dataclass(frozen=True)
class Estimate:
    """What a candidate costs: one row of a plan. Tokens are those of all replicas.

    Times are those of the pipeline and of `update`.

    Attributes:
      plan: of the candidate, with the seconds of ops that are simulated.
      report: simulated times, in seconds.
      bytes: of a device.
      sent: bytes that a device sends per step: messages, and mirrored stages.
      mirroring: seconds to send the mirrored stages of a bidirectional schedule; else 0.
      update: seconds after the scan: gradients that are reduced over dp, parameters that are
        updated and gathered, moments that come from the host and return.
      waiting: seconds per step for which compute waits for copies with the host.
      exposed: seconds per step for which compute waits for replicas, over ep and cp.
      tokens: per step.
      saved: share of the time that overlapping steps would save; None: unknown.
      configured: whether it is the configuration's own schedule, exactly as a run has it.
    """

    plan: RunPlan
    report: SimulationReport
    bytes: RankBytes
    sent: int
    mirroring: float
    update: float
    waiting: float
    exposed: float
    tokens: int
    saved: float | None = None
    configured: bool = False

    @property
    def variant(self) -> ScheduleVariant:
        """The schedule family with its options."""
        return variant_of(self.plan.config)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.variant.label

    @property
    def live(self) -> int:
        """Most live (microbatch, stage) pairs on any rank."""
        return self.plan.buffers.slots.for_w

    @property
    def seconds(self) -> float:
        """Seconds of a step: of the scan, of mirroring, and between scan and next step."""
        return self.report.scan_makespan + self.mirroring + self.update

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all replicas."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second, divided by the number of devices."""
        return self.tokens_per_second / self.plan.config.parallel.devices

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s of a device, without recomputation, as `train` logs them."""
        config = self.plan.config
        flops = config.model.flops_per_token(config.train.seq_len)
        flops -= config.model.frozen_flops(config.lora.rank)
        return self.tokens_per_second_per_gpu * flops / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the dense bfloat16 peak, also where products are in fp8."""
        return self.tflops_per_gpu * 1e12 / self.plan.devices.hardware.sheet.flops


def estimates(
    config: Config,
    seconds: OpSeconds,
    *,
    devices: Devices | None = None,
    families: Collection[str] = (),
    progress: PlanProgress | None = None,
) -> tuple[list[Estimate], dict[str, str]]:
    """Return the estimates of all schedules that fit the sizes, and by label why others do not.

    The configuration's own schedule comes first.

    Args:
      config: of the run, with concrete sizes.
      seconds: costs of ops.
      devices: of the run; None: none is present (`Devices.planned`).
      families: names of the schedules besides the configuration's own; empty: all.
      progress: prints how many are done, and the fastest of them.
    """
    own, *others = variants(config)
    every = [own, *(one for one in others if not families or one.family in families)]
    devices = devices or Devices.planned(config)
    results: dict[ScheduleVariant, Estimate | str] = {}
    for variant in sorted(every, key=lambda variant: not FAMILIES[variant.family].is_searched):
        results[variant] = _estimate_variant(config, devices, variant, seconds)
        if progress:
            progress(lambda: _done(results, len(every)))
    refused = {v.label: found for v in every if isinstance(found := results[v], str)}
    rows = [
        dataclasses.replace(found, configured=v == own)
        for v in every
        if not isinstance(found := results[v], str)
    ]
    return rows, refused


def _estimate_variant(
    config: Config, devices: Devices, variant: ScheduleVariant, seconds: OpSeconds
) -> Estimate | str:
    """The estimate of a variant, or the reason why the sizes forbid it."""
    try:
        plan = arrange_variant(config, devices, variant, seconds)
    except ScheduleError as error:
        return str(error)
    return estimate(plan, seconds)


def _done(results: Mapping[ScheduleVariant, Estimate | str], of: int) -> str:
    found = [one for one in results.values() if isinstance(one, Estimate)]
    best = max(found, key=lambda one: one.tokens_per_second, default=None)
    fastest = (
        f", fastest so far {best.label}, {best.tokens_per_second:,.0f} tokens/s" if best else ""
    )
    return f"plan: {len(results)} of {of} schedules{fastest}"


def gain_over(own: Estimate, fastest: Estimate, memory: float, name: str = "") -> str:
    """Return how many more tokens/s `fastest` has than the configured `own`, in words.

    Args:
      own: of the configuration, which may be for another number of devices.
      fastest: what is recommended.
      memory: bytes of a device that a plan may fill.
      name: of `own`, in place of its label.
    """
    own_devices, devices = (one.plan.config.parallel.devices for one in (own, fastest))
    more = fastest.tokens_per_second / own.tokens_per_second * own_devices / devices - 1
    rate = "tokens/s" if own_devices == devices else "tokens/s per device"
    than = f"{abs(more):.1%} {'more' if more >= 0 else 'fewer'} {rate} than"
    fits = "" if own.bytes.total <= memory else ", which does not fit"
    return f"{than} the configured {name or own.label}{fits}"


def estimate(plan: RunPlan, seconds: OpSeconds | None = None) -> Estimate:
    """Simulate a plan, with `seconds` in place of its own."""
    plan = dataclasses.replace(plan, seconds=seconds or plan.seconds)
    seconds, buffers = plan.seconds, plan.buffers
    report = _simulated(plan)

    def more_than_with(**other: object) -> float:
        if all(getattr(seconds, name) == value for name, value in other.items()):
            return 0.0
        less = dataclasses.replace(plan, seconds=replace(seconds, **other))
        return report.scan_makespan - _simulated(less).scan_makespan

    message = costs_of(plan.config).message
    mirrored = mirrored_bytes(plan.config, plan.layout)
    return Estimate(
        plan,
        report,
        plan.memory,
        buffers.ticks * len(buffers.lanes) * message + mirrored,
        seconds.sending(mirrored, message),
        update_seconds(plan.config, plan.layout, seconds),
        more_than_with(copies=NO_COPIES),
        more_than_with(exchange=NO_EXCHANGE, sharing=NO_EXCHANGE),
        plan.config.tokens_per_step,
    )


def update_seconds(config: Config, layout: "StageLayout", seconds: OpSeconds) -> float:
    """Seconds of a step outside of the scan: reductions and gathers over dp, moments, the update.

    Gradients of a layer are reduced while those of layers before it are computed, and a layer is
    gathered while the first F of layers before it runs; both are waited for in one layer.
    """
    traffic, layer = step_traffic(config, layout), seconds.layer
    reduced = traffic.summed * seconds.network + traffic.scattered * seconds.shards
    reduced += traffic.across * seconds.groups
    sent = _exposed(reduced, layer.whole_backward, config, layout)
    sent += _exposed(traffic.gathered * seconds.shards, layer.F, config, layout)
    return sent + traffic.host * seconds.host + update_bytes(config, layout) * seconds.memory


def _exposed(sent: float, compute: float, config: Config, layout: "StageLayout") -> float:
    """Seconds of `sent` that all layers but one, which take `compute` seconds each, do not hide."""
    layers = 1 if config.parallel.reshards else len(layout.slot_kinds)
    return max(sent / layers, sent - compute * (layers - 1))


def step_seconds(plan: RunPlan) -> float:
    """Seconds of the scan of a plan and of mirroring: `Estimate.seconds` without `update`."""
    scan = scan_time(plan.schedule, plan.costs, plan.lockstep)
    mirrored = mirrored_bytes(plan.config, plan.layout)
    return scan + plan.seconds.sending(mirrored, costs_of(plan.config).message)


def _simulated(plan: RunPlan) -> SimulationReport:
    return simulate(plan.schedule, plan.costs, plan.lockstep)


def overlapped(one: Estimate, steps: int) -> Estimate:
    """Return the estimate with the share of time that `steps` overlapping steps would save.

    The share is one of the pipeline's time, in which updates take none. A bidirectional schedule's
    estimate is returned as it is.
    """
    plan = one.plan
    if plan.schedule.placement.mirrored_from is not None:
        return one
    saved = fusion_gain(plan.schedule, steps, plan.costs, plan.lockstep)
    return dataclasses.replace(one, saved=saved)
