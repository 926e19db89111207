"""`bench ops --table`: the table of a card, by which `plan --machine FILE.json` times kernels."""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import jax

from jaxpipe.config import ConfigError, first_line
from jaxpipe.lab.bench import options
from jaxpipe.lab.bench.card_kernels import Kernel, ProductKernel, TimedKernel, grid, needed
from jaxpipe.lab.bench.processes import BenchError, processor_name
from jaxpipe.planning.cost.card import deviations
from jaxpipe.planning.cost.card_table import (
    CardTable,
    Itemsize,
    MeasuredAttention,
    MeasuredCopy,
    MeasuredProduct,
    SustainedShare,
)
from jaxpipe.runtime.devices import DEVICES, Device, check_devices, data_sheet_of, host_memory
from jaxpipe.runtime.environment import usable_share, use_gpu_memory

_LEAST_ROWS = 32
_PCIE = 32e9  # bytes per second to another device of the host, if no data sheet has them
_WITH_FP8 = 8.9  # compute capability
_LOADED = 1 / 24  # share of the time limit in which the rate under load is measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench ops` that are for a table."""
    add = parser.add_argument
    add("--table", action="store_true",
        help="measure the card, without a configuration, for `plan --machine`")  # fmt: skip
    add("--minutes", type=float, default=8,
        help="time for a table (8); what its laws need comes first, in any case")  # fmt: skip
    add("--rows", type=int,
        help="rows of most products of a table, to which its other sizes are in proportion (4096; "
        "on CPU 512)")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Measure the kernels of the table, print how well its laws fit, and write the file."""
    if "config" in arguments:
        raise ConfigError(f"--table measures the card: leave out {arguments.config}.")
    if arguments.out is None:
        raise ConfigError("--table without a file to write: give --out FILE.json.")
    options.check_out(arguments.out)
    use_gpu_memory()
    check_devices()
    device = jax.devices()[0]
    rows = arguments.rows or (512 if device.platform == "cpu" else 4096)
    if rows < _LEAST_ROWS:
        raise ConfigError(f"--rows {rows} must be at least {_LEAST_ROWS}.")
    survey = Survey(device, source_of(arguments, device), arguments.minutes, arguments.repeats)
    table = survey.table(rows)
    options.write_json(table, arguments.out)
    print(summary(table, survey.left_out, arguments.out))


def source_of(arguments: argparse.Namespace, device: jax.Device) -> str:
    """With what an entry is measured: date, versions, platform and command."""
    found = options.provenance(arguments)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    runtime = " ".join(device.client.platform_version.split())
    return f"{found['date']}, {versions}, {runtime}: `{found['command']}`"


class Survey:
    """The measurements of a table on a device, within a time limit.

    Attributes:
      left_out: kernels that were not measured, by the reason.
    """

    def __init__(self, device: jax.Device, source: str, minutes: float, repeats: int):
        self._device, self._source, self._repeats = device, source, repeats
        self._limit, self._begin, self._longest = 60 * minutes, time.monotonic(), 0.0
        self._launch = 0.0
        self._found: list[MeasuredProduct | MeasuredAttention | MeasuredCopy] = []
        self.left_out: dict[str, list[str]] = {}

    def table(self, rows: int) -> CardTable:
        """Measure; raises `BenchError` if what could be measured is too little for the laws."""
        itemsizes = _itemsizes(self._device)
        first, others = tuple(needed(rows, itemsizes)), tuple(grid(rows, itemsizes))
        total = len(first) + len(others)
        for kernel in first:
            self._measure(kernel, total)
        sustained = self._sustained(next(one for one in first if isinstance(one, ProductKernel)))
        for kernel in others:
            if self._elapsed + self._longest <= self._limit:
                self._measure(kernel, total)
            else:
                self._leave_out(kernel, "no time")
        products = tuple(one for one in self._found if isinstance(one, MeasuredProduct))
        attention = tuple(one for one in self._found if isinstance(one, MeasuredAttention))
        copies = tuple(one for one in self._found if isinstance(one, MeasuredCopy))
        name = device_name(self._device)
        sheet = None if name in DEVICES else _measured_sheet(self._device, products, copies)
        table = CardTable(name, products, attention, copies, sustained, sheet)
        try:
            deviations(table)
        except ConfigError as error:
            raise BenchError("\n".join((f"no table: {error}", *_listed(self.left_out)))) from error
        return table

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._begin

    def _measure(self, kernel: Kernel, total: int) -> None:
        begin = self._elapsed
        number = len(self._found) + sum(map(len, self.left_out.values())) + 1
        try:
            seconds = self._median(TimedKernel(kernel))
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            self._leave_out(kernel, first_line(error))
            return
        if not self._found:
            self._launch = seconds  # of the smallest copy
        seconds -= min(seconds / 2, kernel.launches * self._launch)
        entry = kernel.measured(seconds, self._source)
        self._longest = max(self._longest, self._elapsed - begin)
        self._found.append(entry)
        _print(f"{number} of {total}, {self._elapsed:.0f} s: {kernel}: {_rate(entry)}")

    def _leave_out(self, kernel: Kernel, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(str(kernel))

    def _median(self, timed: TimedKernel) -> float:
        return median(timed.seconds() for _ in range(self._repeats))

    def _sustained(self, kernel: Kernel) -> SustainedShare:
        """The rate of a kernel that ran for a while, relative to its first runs."""
        timed = TimedKernel(kernel)
        short, end = self._median(timed), self._elapsed + _LOADED * self._limit
        loaded = [timed.seconds()]
        while self._elapsed < end:
            loaded.append(timed.seconds())
        share = min(1.0, short / median(loaded[len(loaded) // 2 :]))
        _print(f"under load for {_LOADED * self._limit:.0f} s: {kernel}: {share:.2f} of its rate")
        return SustainedShare(share, self._source)


def device_name(device: jax.Device) -> str:
    """The name of a device's data sheet, or else jax's name, or that of the processor."""
    if device.platform == "cpu":
        return processor_name()
    return data_sheet_of(device.device_kind) or device.device_kind


def _itemsizes(device: jax.Device) -> tuple[Itemsize, ...]:
    """Itemsizes of the operands that are multiplied, those of most training first."""
    if device.platform == "cpu":
        return 4, 2
    sheet = data_sheet_of(device.device_kind)
    capability = float(getattr(device, "compute_capability", 0))
    has_fp8 = DEVICES[sheet].fp8 if sheet else capability >= _WITH_FP8
    return (2, 1, 4) if has_fp8 else (2, 4)


def _measured_sheet(
    device: jax.Device, products: Iterable[MeasuredProduct], copies: Iterable[MeasuredCopy]
) -> Device:
    """The data sheet of a device of which none is known, by the fastest that was measured."""
    best = {one.itemsize == 1: 0.0 for one in products}
    for one in products:
        best[one.itemsize == 1] = max(best[one.itemsize == 1], one.tflops * 1e12)
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit", 0) / usable_share()
    return Device(
        flops=best.get(False, 0.0), fp8=best.get(True, 0.0), link=_PCIE,
        memory=int(memory) or host_memory(),
        bandwidth=max((one.bytes / one.seconds for one in copies), default=0.0),
        cores=getattr(device, "core_count", 1),
    )  # fmt: skip


def summary(table: CardTable, left_out: Mapping[str, list[str]], path: Path) -> str:
    """Sentences on the table: how well its laws fit, what it lacks, and how to use it."""
    lines = [f"{table.device}: rates under load are {table.sustained.share:.2f} of those measured."]
    for kind, ratios in deviations(table).items():
        errors = sorted(max(ratio, 1 / ratio) for ratio in ratios)
        lines.append(
            f"{kind}: {len(errors)} entries; the law through them is off by a factor of "
            f"{median(errors):.2f} (median), at most {errors[-1]:.2f}."
        )
    if table.sheet:
        lines.append(
            f"No data sheet of {table.device} is known: its peaks are the fastest measured, and "
            f"its link is taken to be PCIe's {_PCIE / 1e9:.0f} GB/s (`link` of a machine's file)."
        )
    lines += [*_listed(left_out), f"wrote {path}: python -m jaxpipe.plan CONFIG --machine {path}"]
    return "\n".join(lines)


def _listed(left_out: Mapping[str, list[str]]) -> list[str]:
    return [
        f"left out ({reason}), {len(names)}: {'; '.join(names)}."
        for reason, names in left_out.items()
    ]


def _rate(entry: MeasuredProduct | MeasuredAttention | MeasuredCopy) -> str:
    if isinstance(entry, MeasuredCopy):
        return f"{entry.seconds * 1e6:,.1f} us, {entry.bytes / entry.seconds / 1e9:,.1f} GB/s"
    return f"{entry.tflops:,.4g} TFLOP/s"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
