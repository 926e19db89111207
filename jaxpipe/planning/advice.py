"""Which candidate to take, and what to change for a smaller bubble."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from msgspec.structs import replace

from jaxpipe.config import Config
from jaxpipe.core.schedule import ScheduleError, simulate
from jaxpipe.planning.candidates import arrange_variant, sizes_of, variant_of
from jaxpipe.planning.cost.compute import launches_of_halves, update_bytes
from jaxpipe.planning.cost.estimate import Estimate, estimate
from jaxpipe.planning.cost.hardware import Hardware, op_seconds
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.planning.limits import planned_bytes
from jaxpipe.planning.resolve import RunPlan
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.schedules import FAMILIES

_TRIES = 6
_EQUAL = 1e-3  # gain over the configured schedule that is none
_CLEAR_GAIN = 0.05  # of the scan's time
_WORTHWHILE = 0.01  # of the tokens per second


@dataclasses.dataclass(frozen=True)
class Advice:
    """The label of the fastest candidate that fits in memory, if any, and advice in sentences."""

    best: str | None
    sentences: tuple[str, ...]


def advise(
    config: Config,
    estimates: Sequence[Estimate],
    *,
    memory: float,
    bubble: float | None,
    hardware: Hardware | None = None,
) -> Advice:
    """Find the fastest candidate within `memory` bytes a device, and how to reach `bubble`.

    `memory` is what a plan may fill of a device (`planned_bytes`). `bubble` is the wanted
    idle share of the scan; None: no advice on it. `hardware` None: no advice on layers in halves.
    """
    fitting = sorted(
        (e for e in estimates if e.bytes.total <= memory),
        key=lambda e: e.tokens_per_second * (1 + _EQUAL * e.configured),
        reverse=True,
    )
    sentences = []
    if not fitting:
        least = min(estimates, key=lambda e: e.bytes.total)
        sentences.append(
            f"nothing fits the {memory / 2**30:.1f} GiB of a device that a plan fills: "
            f"{least.label} needs least, "
            f"{least.bytes.total / 2**30:.1f} GiB; raise parallel.pp or parallel.tp, lower "
            f"train.microbatch_size, or set {_remat_that_fits(least.plan, memory)}."
        )
    if fitting and fitting[0].waiting:
        sentences.append(_advise_on_copies(fitting[0]))
    if fitting and hardware:
        sentences += _advise_on_halves(fitting[0], memory, hardware)
    if bubble is not None and fitting:
        sentences.append(_advise_on_bubble(config, fitting[0], bubble))
    return Advice(fitting[0].label if fitting else None, tuple(sentences))


def _remat_that_fits(plan: RunPlan, memory: float) -> str:
    """The setting that recomputes as few layers of a plan as fit in memory, else all."""
    train = plan.config.train
    most = 0 if train.remat == "full" or train.offload_layers else max(plan.layers)
    for layers in range(train.remat_layers + 1, most):
        fewer = replace(plan.config, train=replace(train, remat_layers=layers))
        if rank_bytes(fewer, plan.layout, plan.buffers).total <= memory:
            return f"train.remat_layers={layers}"
    return "train.remat='full'"


def _advise_on_copies(best: Estimate) -> str:
    """Sentence on a step's wait for host copies, and on how many layers' copies would hide."""
    label, offloaded, seconds = best.label, best.plan.config.train.offload_layers, best.plan.seconds
    for layers in range(offloaded - 1, -1, -1):
        fewer = replace(seconds, copies=replace(seconds.copies, layers=layers))
        if not estimate(best.plan, fewer).waiting:
            break
    return (
        f"{label}: compute waits for copies with the host {best.waiting / best.seconds:.1%} of "
        f"the step (train.offload_layers={offloaded}); those of {layers} layers would be hidden."
    )


def _advise_on_halves(best: Estimate, memory: float, hardware: Hardware) -> list[str]:
    """A sentence on what the other `parallel.overlap_halves` gains, if that is clear and fits."""
    plan = best.plan
    parallel = plan.config.parallel
    has_waits = plan.seconds.least_in_halves != plan.seconds
    if parallel.costs or plan.buffers.pairs or not (has_waits or parallel.overlap_halves):
        return []
    halved = not parallel.overlap_halves
    other = replace(plan.config, parallel=replace(parallel, overlap_halves=halved))
    try:
        check_settings(other)
        if halved and best.seconds / _least_in_halves(best, hardware) - 1 < _WORTHWHILE:
            return []
        seconds = op_seconds(other, hardware)
        more = estimate(arrange_variant(other, plan.devices, best.variant, seconds), seconds)
    except ValueError:  # sizes or the schedule exclude halves
        return []
    gain = best.seconds / more.seconds - 1
    if gain < _WORTHWHILE or more.bytes.total > memory:
        return []
    why = (
        "hides collectives of F behind compute"
        if halved
        else "has kernels on all rows, which halves make slower than they hide collectives of F"
    )
    return [
        f"{best.label}: parallel.overlap_halves={'true' if halved else 'false'} {why}, for "
        f"{gain:.1%} more tokens/s and {more.bytes.total / 2**30:.1f} GiB a device."
    ]


def _least_in_halves(best: Estimate, hardware: Hardware) -> float:
    """Return a lower bound on the seconds of an estimate's step in halves, without their trace.

    Halves launch `launches_of_halves` more, and otherwise take no less than `least_in_halves`. They
    keep the stages, and so the work of all ranks. Where they keep the order of actions too, no cell
    of the scan begins before the ranks that run asynchronously would begin it: it waits for the
    same inputs and more. The update moves the same bytes.
    """
    plan, seconds = best.plan, best.plan.seconds
    layer = seconds.layer.beside(launches_of_halves(plan.config, hardware))
    least = dataclasses.replace(plan, seconds=replace(seconds, layer=layer).least_in_halves)
    report = simulate(plan.schedule, least.costs, plan.lockstep)
    is_searched = FAMILIES[best.variant.family].is_searched
    keeps_order = not (is_searched or plan.lockstep.in_flight or plan.schedule.recomputes)
    scan = report.makespan * (1 if keeps_order else 1 - report.bubble_global)
    updated = update_bytes(plan.config, plan.layout) * seconds.memory
    return scan + best.mirroring + updated


def _advise_on_bubble(config: Config, best: Estimate, bubble: float) -> str:
    """Search for the number of microbatches that brings the scan's bubble down to `bubble`."""
    label, seconds, now = best.label, best.plan.seconds, best.report.bubble_scan
    m, pp = config.train.grad_accum_steps, config.parallel.pp
    if now <= bubble:
        return f"{label}: the bubble is {now:.1%} already."
    most = max(64 * pp, 2 * m)  # of which the schedule is still built in seconds
    for _ in range(_TRIES):
        # Idle time hardly depends on M, so scale the work until idle time is the wanted share.
        m = min(most, max(m + pp, math.ceil(m * now / (1 - now) * (1 - bubble) / bubble)))
        m = -(-m // pp) * pp
        train = replace(config.train, grad_accum_steps=m)
        longer = replace(config, train=train)
        try:
            more = arrange_variant(longer, best.plan.devices, best.variant, seconds)
        except ScheduleError as error:
            return f"{label}: {error}"
        result = estimate(more, seconds)
        now = result.report.bubble_scan
        if now <= bubble:
            return (
                f"{label}: train.grad_accum_steps={m} brings the bubble from "
                f"{best.report.bubble_scan:.1%} to {now:.1%}, for "
                f"{result.bytes.total / 2**30:.1f} GiB a device."
            )
        if m >= most:
            break
    return (
        f"{label}: not even train.grad_accum_steps={m} brings the bubble below {bubble:.1%} "
        f"({now:.1%}): its ranks' stages differ, or the scan costs it; try parallel.layer_split "
        f"or another schedule."
    )


def advise_on_in_flight(plan: RunPlan) -> str | None:
    """The `parallel.in_flight` that clearly lowers a plan's bubble and fits in memory, if any.

    The sentence gives the bubble of the scan for ops of equal time. A search for another order, and
    so a family that is searched, would take too long before a run.
    """
    own = variant_of(plan.config)
    family, now = FAMILIES[own.family], _bubble(plan)
    if family.is_searched:
        return None
    usable = planned_bytes(plan.devices.memory or math.inf)
    found = []
    for variant in family.variants(family.name, sizes_of(plan.config)):
        if variant != own and variant._replace(in_flight=None) == own:
            with contextlib.suppress(ScheduleError):  # forbidden by sizes
                ahead = arrange_variant(plan.config, plan.devices, variant, plan.seconds)
                found.append((_bubble(ahead), ahead))
    for bubble, ahead in sorted(found, key=lambda one: one[0]):
        if bubble < now - _CLEAR_GAIN and ahead.memory.total <= usable:
            live, before = (one.buffers.slots.for_w for one in (ahead, plan))
            return (
                f"parallel.in_flight={ahead.config.parallel.in_flight} makes it {bubble:.1%}, "
                f"with up to {live} live microbatches per rank (now {before})"
            )
    return None


def _bubble(plan: RunPlan) -> float:
    """The idle share of the scan, for ops of equal time."""
    return simulate(plan.schedule, lockstep=plan.lockstep).bubble_scan
