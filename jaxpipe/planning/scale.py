"""`bench scale`: a configuration on more devices, on paper: weak and strong scaling by simulation.

For pipelines of 2 to 64 ranks and 1 to 1,024 replicas it takes the schedule that trains most tokens
a second of those that fit the memory, by the clock of the scan. Weak scaling gives every
replica the microbatches of the configuration; strong scaling divides the configuration's global
batch. Assumed: the seconds of ops are those of `parallel.costs`, or a share of the device's data
sheet; a message between neighbours takes its bytes over `--link`, hidden only as the scan hides it;
after the last microbatch the gradients are summed over the replicas (in
`parallel.grad_reduce_dtype`) and the parameters gathered in the compute dtype, at `--network` bytes
a second and device, behind nothing; the update itself is not counted.
"""

import argparse
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.planning import (
    ITEMSIZE,
    Estimate,
    Hardware,
    candidate,
    estimate,
    layout_of,
    op_seconds,
    rank_bytes,
    sizes_of,
)
from jaxpipe.planning.checks import filled, validate
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.schedule import ScheduleError, Variant

RANKS = (2, 4, 8, 16, 32, 64)
REPLICAS = (1, 4, 16, 64, 256, 1024)
_COLUMNS = (
    "scaling", "pp", "dp", "devices", "M", "schedule", "bubble", "transfers", "sums", "GiB",
    "tokens/s/device", "MFU",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A mesh with the schedule that is fastest there; shares are of the step's time."""

    scaling: str  # "weak" or "strong"
    config: Config
    variant: Variant
    seconds: float  # of a step
    bubble: float
    transfers: float  # by which messages lengthen the step
    sums: float  # of gradients, and gathers of parameters, over the replicas
    bytes: int  # of a device

    @property
    def devices(self) -> int:
        """Number of devices of the whole mesh."""
        parallel = self.config.parallel
        return parallel.pp * parallel.dp * parallel.tp

    @property
    def tokens_per_device(self) -> float:
        """Tokens a second on one device."""
        return self.config.tokens_per_step / self.seconds / self.devices


@dataclass(frozen=True)
class Assumptions:
    """A device, its memory in bytes, and bytes/s that it exchanges with other replicas."""

    hardware: Hardware
    network: float
    memory: float


Refused = dict[str, dict[tuple[int, int], str]]  # label -> (pp, M) -> why


def points(config: Config, given: Assumptions) -> tuple[list[Point], Refused]:
    """All meshes that the configuration can have, and why schedules were left out on some."""
    meshes = [(s, pp, dp) for s in ("weak", "strong") for pp in RANKS for dp in REPLICAS]
    scaler = _Scaler(config, given)
    found = [scaler.point(*mesh) for mesh in track(meshes, "simulating", transient=True)]
    return [point for point in found if point is not None], scaler.refused


class _Scaler:
    """One configuration's estimates, each made once."""

    def __init__(self, config: Config, given: Assumptions):
        self.config, self.given = config, given
        self.refused: Refused = {}
        self.estimates = cache(self._estimates)

    def point(self, scaling: str, pp: int, dp: int) -> Point | None:
        """The fastest that fits, or else the smallest; None where the sizes allow none."""
        train, microbatches = self.config.train, self.config.train.grad_accum_steps
        if scaling == "strong":
            microbatches, rest = divmod(microbatches * self.config.parallel.dp, dp)
            if rest or not microbatches:
                return None
        parallel = msgspec.structs.replace(self.config.parallel, pp=pp, dp=dp)
        train = msgspec.structs.replace(train, grad_accum_steps=microbatches)
        config = msgspec.structs.replace(self.config, parallel=parallel, train=train)
        found = [self._point(scaling, config, *pair) for pair in self.estimates(pp, microbatches)]
        fit = [point for point in found if point.bytes <= self.given.memory]
        if fit:
            return min(fit, key=lambda point: point.seconds)
        return min(found, key=lambda point: point.bytes, default=None)

    def _estimates(self, pp: int, microbatches: int) -> list[tuple[Estimate, Estimate]]:
        """Of every schedule, with its messages and with messages that take no time."""
        parallel = msgspec.structs.replace(self.config.parallel, pp=pp, dp=1, in_flight=0)
        train = msgspec.structs.replace(self.config.train, grad_accum_steps=microbatches)
        config = msgspec.structs.replace(self.config, parallel=parallel, train=train)
        seconds = op_seconds(config, self.given.hardware)
        found = []
        for variant in _variants(config):
            try:
                one = candidate(config, seconds, variant)
            except ScheduleError as error:
                self.refused.setdefault(variant.label, {})[pp, microbatches] = str(error)
                continue
            found.append(
                (estimate(config, one, seconds),
                 estimate(config, one, msgspec.structs.replace(seconds, transfer=0.0)))
            )  # fmt: skip
        return found

    def _point(self, scaling: str, config: Config, timed: Estimate, free: Estimate) -> Point:
        dp, item = config.parallel.dp, ITEMSIZE[config.train.compute_dtype]
        item += ITEMSIZE[config.parallel.grad_reduce_dtype]
        summed = timed.bytes.parameters * (item / 4) * (dp - 1) / dp / self.given.network
        pipeline = timed.seconds
        seconds = pipeline + summed
        choice = timed.candidate.choice
        layout = layout_of(config, choice.schedule.placement, choice.layers)
        held = rank_bytes(choice.settled(config), layout, timed.tables)
        return Point(
            scaling,
            config,
            timed.candidate.variant,
            seconds,
            timed.report.bubble_scan * timed.report.scan_makespan / seconds,
            (pipeline - free.seconds) / seconds,
            summed / seconds,
            held.total,
        )


def _variants(config: Config) -> list[Variant]:
    """Schedules that need no search."""
    sizes = sizes_of(config)
    chunks = [v for v in (2, 4) if sizes.layers >= sizes.pp * v]
    packed = Variant("1f1b", in_flight=sizes.packed)
    return [*map(Variant, ("1f1b", "zb_h1", "dualpipe")), packed,
            *(Variant("interleaved_1f1b", virtual_stages=v) for v in chunks)]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.add_argument("config", help="a TOML file, such as configs/llama3_8b_pp4.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add("--device", default="H100", choices=DEVICES, help="its memory and peak (default H100)")
    add("--efficiency", type=float, default=0.5, help="share of its peak that ops reach (0.5)")
    add("--link", type=float, default=50e9, help="bytes/s to a neighbour in the pipeline (50e9)")
    add("--network", type=float, default=50e9, help="bytes/s with other replicas (50e9)")
    add("--json", action="store_true", help="print a JSON list instead of the table")


def run(arguments: argparse.Namespace) -> None:
    """Simulate and print."""
    config = filled(configs.load(arguments.config, arguments.overrides), None)
    validate(config)
    if not 0 < arguments.efficiency <= 1 or min(arguments.link, arguments.network) <= 0:
        raise ConfigError(
            f"--efficiency {arguments.efficiency} must be above 0 and at most 1, --link "
            f"{arguments.link} and --network {arguments.network} above 0."
        )
    hardware = Hardware(arguments.device, arguments.efficiency, arguments.link)
    device = DEVICES[arguments.device]
    found, refused = points(config, Assumptions(hardware, arguments.network, device.memory))
    if arguments.json:
        print(json.dumps([_as_json(point, device.flops) for point in found], indent=1))
        return
    table = Table(*_COLUMNS, title=f"{arguments.config} on {arguments.device}")
    for point in found:
        row = _as_json(point, device.flops)
        over = "!" if point.bytes > device.memory else ""
        table.add_row(
            point.scaling, str(row["pp"]), str(row["dp"]), f"{point.devices:,}", str(row["M"]),
            point.variant.label, *(f"{row[name]:.1%}" for name in ("bubble", "transfers", "sums")),
            f"{point.bytes / 2**30:.1f}{over}", f"{point.tokens_per_device:,.0f}",
            f"{row['mfu']:.1%}",
        )  # fmt: skip
    console = Console(highlight=False, width=max(118, Console().width))
    console.print(table)
    for label, reasons in refused.items():
        sizes = ", ".join(f"pp={pp} M={m}" for pp, m in reasons)
        why = next(iter(reasons.values()))
        console.print(f"{label} is not for {sizes}: {why}", style="dim", soft_wrap=True)
    console.print("Assumed: " + __doc__.partition("Assumed: ")[2].strip())


def _as_json(point: Point, peak: float) -> dict[str, Any]:
    flops = point.config.model.flops_per_token(point.config.train.seq_len)
    parallel = point.config.parallel
    return {
        "scaling": point.scaling,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "tp": parallel.tp,
        "M": point.config.train.grad_accum_steps,
        "schedule": point.variant.label,
        "step_seconds": point.seconds,
        "bubble": point.bubble,
        "transfers": point.transfers,
        "sums": point.sums,
        "bytes": point.bytes,
        "tokens_per_second_per_device": point.tokens_per_device,
        "mfu": point.tokens_per_device * flops / peak,
    }
