"""Check one configuration for several cards, device counts and schedules."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.config.units import readable_bytes
from jaxpipe.lab.gpu.cards import card_capability
from jaxpipe.lab.gpu.check import CompiledReport, check_step
from jaxpipe.planning import Devices, Estimate, RunPlan, resolve
from jaxpipe.planning.cost.machine import machine_of
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.runtime.devices import DEVICES

_COLUMNS = (
    "card", "devices", "mesh", "schedule", "peak", "fits", "permutes", "copies", "graphs",
    "step, s", "by plan", "compiled, s",
)  # fmt: skip


class CardRequest(NamedTuple):
    """A card, and the plan of the run to compile for it."""

    card: str
    plan: RunPlan


def load_requests(
    path: str | Path, overrides: Sequence[str], cards: Sequence[str], devices: Sequence[int],
    schedules: Sequence[str], memory: float | None = None,
) -> list[CardRequest]:  # fmt: skip
    """Load and resolve the configuration for all combinations of cards, devices and schedules.

    An empty list keeps the configuration's value. For several device counts, parallel.dp is set to
    fill each count with data-parallel replicas. `memory` [bytes] overrides the memory of the cards.
    Raises `ConfigError` for an invalid combination.
    """
    replicas = ["parallel.dp=-1"] if len(devices) > 1 else []
    requests = []
    for count in devices or (None,):
        for schedule in schedules or (None,):
            named = [f"parallel.schedule={schedule}"] if schedule else []
            config = configs.load(path, [*overrides, *replicas, *named])
            check_settings(config)
            requests += [
                CardRequest(card, resolve(config, card_devices(card, count, memory)))
                for card in cards
            ]
    return requests


def card_devices(card: str, count: int | None, memory: float | None) -> Devices:
    """The devices of a card; `memory` [bytes] overrides its own."""
    return Devices(
        "cuda", count, memory=memory or DEVICES[card.upper()].memory,
        capability=card_capability(card), hardware=machine_of(card.upper()),
    )  # fmt: skip


def compile_best(
    found: Sequence[Estimate], card: str, count: int, memory: float | None
) -> tuple[list[Estimate], Table]:
    """Compile the steps of a search's results; return those that fit, and a table of all."""
    devices = card_devices(card, count, memory)
    every = [CardRequest(card, resolve(one.plan.config, devices)) for one in found]
    reports = [check_step(one.plan, one.card) for one in every]
    fitting = [one for one, report in zip(found, reports) if report.fits]
    return fitting, build_table(every, reports)


def build_table(every: Sequence[CardRequest], reports: Sequence[CompiledReport]) -> Table:
    """Return a table with a row per combination."""
    table = Table(*_COLUMNS, box=None, pad_edge=False, padding=(0, 1))
    for one, report in zip(every, reports):
        table.add_row(*_row(one, report))
    return table


def _row(one: CardRequest, report: CompiledReport) -> list[str]:
    program, (step, planned) = report.program, report.step
    return [
        report.card,
        str(report.devices),
        str(one.plan.config.parallel.mesh),
        one.plan.config.parallel.schedule,
        readable_bytes(report.bytes.peak),
        "yes" if report.fits else "NO",
        "phased" if report.phases > 1 else "hidden" if program.hidden else "NOT HIDDEN",
        str(sum(copy.count for copy in program.buffer_copies)),
        "a tick" if report.graphs and report.graphs.whole else "parts",
        "" if step is None else f"{step:.3g}",
        f"{planned:.3g}",
        f"{report.seconds:.0f}",
    ]
