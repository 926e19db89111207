"""Published throughputs beside what `plan` says of the same layout: how far to trust a plan.

The figures, their sources and the layouts are in `published.toml`. A step takes as long as on the
system that ran it: most run every rank asynchronously, and none is one scan as jaxpipe's step is.
A system that differs from jaxpipe in kernels, overlap or recomputation has one factor, the median
of measured over planned. The errors are what is left; those of leaving a figure out take the factor
from the system's others.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from statistics import median

from rich.console import Console
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.core.schedule import Costs, Op, simulate
from jaxpipe.planning.candidates import arrange_variant, variant_of
from jaxpipe.planning.cost.estimate import Estimate, estimate
from jaxpipe.planning.cost.hardware import op_seconds
from jaxpipe.planning.cost.machine import machine
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import resolve_sizes


@dataclass(frozen=True)
class Figure:
    """A published throughput.

    Attributes:
      system: that ran.
      factor: what the system reaches of the planned speed.
      model: with precision and task.
      machine: a name in `cost/machines.toml`.
      measured: tokens per second of a GPU.
      source: repository and file.
      words: settings, as on a command line. `parallel.objective` is the time that a step takes.
        With `parallel.transfer_ticks=1` a rank waits for each message that it sends.
    """

    system: str
    factor: float
    model: str
    machine: str
    measured: float
    source: str
    words: tuple[str, ...]

    def plan(self) -> Estimate:
        """The estimate of its layout, as the table of a plan has it."""
        config = configs.build({}, self.words)
        check_settings(config)
        config, hardware = resolve_sizes(config, None), machine(self.machine)
        devices = replace(Devices.planned(config), memory=hardware.sheet.memory, hardware=hardware)
        seconds = op_seconds(config, hardware)
        return estimate(arrange_variant(config, devices, variant_of(config), seconds), seconds)

    @staticmethod
    def rate(planned: Estimate) -> float:
        """Tokens per second of a GPU of the system that ran a layout that is planned."""
        plan, parallel = planned.plan, planned.plan.config.parallel
        if parallel.objective == "scan":
            return planned.tokens_per_second_per_gpu
        costs = plan.costs
        if parallel.transfer_ticks == 1:
            costs = _with_messages(costs, plan.schedule.stages)
        report = simulate(plan.schedule, costs, plan.lockstep)
        time = report.max_span if parallel.objective == "span" else report.makespan
        return planned.tokens / (time + planned.mirroring + planned.update) / parallel.devices


def _with_messages(costs: Costs, stages: int) -> Costs:
    """The costs of ranks that wait for each message: of F but the last stage's, B but the first's.

    >>> _with_messages(Costs(F=(1, 1, 1), B=(2, 2, 2), W=(2, 2, 2), transfer=0.5), 3).B
    (2, 2.5, 2.5)
    """
    forwards, backwards = costs.by_stage(Op.F, stages), costs.by_stage(Op.B, stages)
    return replace(
        costs,
        F=(*(seconds + costs.transfer for seconds in forwards[:-1]), forwards[-1]),
        B=(backwards[0], *(seconds + costs.transfer for seconds in backwards[1:])),
        transfer=0.0,
    )


@dataclass(frozen=True)
class Comparison:
    """A figure, the tokens per second of a GPU that are planned for its layout, and the layout."""

    figure: Figure
    planned: float
    gpus: int
    layout: str

    @property
    def ratio(self) -> float:
        """Planned over measured, before the factor of the system."""
        return self.planned / self.figure.measured

    @property
    def left(self) -> float:
        """Planned over measured, with the factor of the system."""
        return self.ratio * self.figure.factor


def read_figures() -> list[Figure]:
    """All figures of `published.toml`."""
    text = files("jaxpipe.planning").joinpath("published.toml").read_text("utf-8")
    content = tomllib.loads(text)
    common = content["settings"]["words"].split()
    return [
        Figure(name, system["factor"], model, machine, measured, source, (*common, *words.split()))
        for name, system in content["systems"].items()
        for model, machine, measured, source, words in system["figures"]
    ]


def compare(figures: Sequence[Figure]) -> Iterator[Comparison]:
    """Plan the layout of every figure."""
    for figure in figures:
        planned = figure.plan()
        parallel = planned.plan.config.parallel
        layout = parallel.mesh
        if parallel.pp > 1:
            layout += f" {planned.label}"
        yield Comparison(figure, figure.rate(planned), parallel.devices, layout)


def error(ratio: float) -> float:
    """A ratio as a factor above 1."""
    return max(ratio, 1 / ratio)


def left_out(every: Sequence[Comparison], one: Comparison) -> float:
    """Planned over measured with the factor of the system's other figures."""
    others = [
        other.ratio
        for other in every
        if other.figure.system == one.figure.system and other is not one
    ]
    return one.ratio / median(others) if others else one.ratio


def summary(found: Sequence[Comparison]) -> str:
    """Sentences on the errors: median, nine in ten, and those of leaving one out."""
    errors = sorted(error(one.left) for one in found)
    alone = sorted(error(left_out(found, one)) for one in found)
    within = sum(each <= 1.3 for each in errors) / len(errors)
    return (
        f"{len(found)} figures. Error as a factor, with one factor for each system: median "
        f"{median(errors):.3f}, {within:.0%} within 1.3; where a figure has the factor of its "
        f"system's other figures: median {median(alone):.3f}, "
        f"{sum(each <= 1.3 for each in alone) / len(alone):.0%} within 1.3."
    )


def show(console: Console) -> None:
    """Print the table of all figures and the errors."""
    figures, found = read_figures(), []
    progress = PlanProgress()
    for one in compare(figures):
        found.append(one)
        progress(lambda: f"published: {len(found)} of {len(figures)} figures planned")
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("system", "model", "machine", "GPUs", "layout", "measured", "planned", "ratio",
                 "x factor", "source"):  # fmt: skip
        is_number = name in ("GPUs", "measured", "planned", "ratio", "x factor")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for one in found:
        figure = one.figure
        table.add_row(
            figure.system, figure.model, figure.machine, f"{one.gpus:,}", one.layout,
            f"{figure.measured:,.0f}", f"{one.planned:,.0f}", f"{one.ratio:.2f}",
            f"{one.left:.2f}", figure.source,
        )  # fmt: skip
    console.print(table)
    console.print(
        "measured, planned: tokens/s per GPU. ratio: planned over measured. x factor: the same "
        "with the factor of the system, one for all its figures.", style="dim", soft_wrap=True,
    )  # fmt: skip
    factors = {one.figure.system: one.figure.factor for one in found}
    named = ", ".join(f"{system} {factor:g}" for system, factor in factors.items())
    console.print(f"factors: {named}.", style="dim", soft_wrap=True)
    console.print(summary(found), soft_wrap=True)
