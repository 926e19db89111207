"""A plan as a table for people and as plain types for programs."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from jaxpipe.config import Config
from jaxpipe.planning.advice import Advice
from jaxpipe.planning.costs import costs_of
from jaxpipe.planning.estimate import Estimate
from jaxpipe.planning.hardware import OpSeconds
from jaxpipe.schedule import FAMILIES

_GIB = 2**30
_COLUMNS = (
    "schedule", "ends", "bubble", "span", "scan", "held", "GiB", "stored", "sent", "tokens/s",
)  # fmt: skip
_LEGEND = (
    "ends: embedding and head of the ranks that have them, or shared by all. bubble, span: of "
    "ranks that run freely, over the whole step and over a rank's own; scan: of the scan that "
    "the executor runs. held: microbatches x stages on a rank. GiB: a device's (! too much), "
    "stored: activations of it, sent: to neighbours in a step. *: what the configuration names, as "
    "it would run."
)


class _Extra(NamedTuple):
    """A column that is shown if some schedule has a value for it."""

    name: str
    legend: str
    value: Callable[[Estimate], float | None]
    form: str


_EXTRAS = (
    _Extra(
        "host", "GiB of its host's memory (train.offload_layers, train.offload_moments)",
        lambda one: one.bytes.host / _GIB or None, ".1f",
    ),
    _Extra(
        "exposed", "share of the step for which compute waits for other replicas, over ep or cp",
        lambda one: one.exposed / one.seconds or None, ".1%",
    ),
    _Extra(
        "saved", "share of the scan's time if N steps overlapped, which no run does yet",
        lambda one: one.saved, "z.1%",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What every schedule of a configuration would cost, and the advice.

    Attributes:
      refused: for schedules that are not possible, the reason by label.
      memory: bytes of a device.
    """

    config: Config
    estimates: tuple[Estimate, ...]
    refused: dict[str, str]
    advice: Advice
    seconds: OpSeconds
    memory: float

    def show(self, console: Console) -> None:
        """Print the table, its legend, the reasons of refused schedules, and the advice."""
        parallel, train = self.config.parallel, self.config.train
        ticks = {str(one.plan.lockstep.transfer_ticks) for one in self.estimates}
        model = self.config.model
        every, active = model.parameter_count(), model.active_parameter_count()
        of_token = f" ({active:,} for a token)" if active < every else ""
        console.print(
            f"{every:,} parameters{of_token}, {parallel.mesh}, "
            f"{train.grad_accum_steps} microbatches of {train.microbatch_size} x "
            f"{train.seq_len} tokens, remat {train.remat}, transfers take "
            f"{' or '.join(sorted(ticks))} ticks"
        )
        console.print(self._table())
        more = "".join(f" {extra.name}: {extra.legend}." for extra in self._extras)
        console.print(_LEGEND + more, style="dim", soft_wrap=True)
        for why in dict.fromkeys(self.refused.values()):
            labels = ", ".join(label for label, reason in self.refused.items() if reason == why)
            console.print(f"not possible: {labels}: {why}", style="dim", soft_wrap=True)
        if self.advice.best:
            fastest = next(one for one in self.estimates if one.label == self.advice.best)
            console.print(
                f"fastest within {self.memory / _GIB:.1f} GiB: {self.advice.best} "
                f"({FAMILIES[fastest.variant.family].summary})",
                soft_wrap=True,
            )
        for sentence in (*_traffic(self.config), *self.advice.sentences):
            console.print(sentence, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for name in (*_COLUMNS, *(extra.name for extra in self._extras)):
            justify = "left" if name in ("schedule", "ends") else "right"
            table.add_column(name, justify=justify, no_wrap=True)
        for one in sorted(self.estimates, key=lambda e: -e.tokens_per_second):
            label, report = one.label, one.report
            fits = one.bytes.total <= self.memory
            chosen = label == self.advice.best
            table.add_row(
                label + (" *" if one.configured else ""),
                _ends(one), f"{report.bubble_global:.1%}", f"{report.bubble_span:.1%}",
                f"{report.bubble_scan:.1%}", str(one.held),
                f"{one.bytes.total / _GIB:.1f}" + (" " if fits else "!"),
                f"{one.bytes.activations / _GIB:.1f}", f"{one.sent / _GIB:.1f}",
                f"{one.tokens_per_second:,.0f}",
                *(_format(extra.value(one), extra.form) for extra in self._extras),
                style="bold" if chosen else "" if fits else "dim",
            )  # fmt: skip
        return table

    @property
    def _extras(self) -> list[_Extra]:
        return [
            extra
            for extra in _EXTRAS
            if any(extra.value(one) is not None for one in self.estimates)
        ]

    def as_json(self) -> dict[str, Any]:
        """The plan in plain types."""
        rows = [
            {
                "schedule": one.label,
                "configured": one.configured,
                "ends": _ends(one),
                "fits": one.bytes.total <= self.memory,
                "tokens_per_second": one.tokens_per_second,
                **asdict(one.report),
                "bytes": asdict(one.bytes) | {"total": one.bytes.total},
                "held": one.held,
                "waiting_for_host": one.waiting,
                "waiting_for_replicas": one.exposed,
                "sent_bytes": one.sent,
                "saved_by_overlap": one.saved,
                "layers": one.plan.layers,
            }
            for one in self.estimates
        ]
        return {
            "seconds": msgspec.to_builtins(self.seconds),
            "memory": self.memory,
            "schedules": rows,
            "refused": self.refused,
            **asdict(self.advice),
        }


def _traffic(config: Config) -> Iterator[str]:
    """Sentences on the bytes that expert and context parallelism send over the network."""
    costs, parallel = costs_of(config), config.parallel
    for name, kind in costs.kinds.items():
        of_experts = f"all-to-alls over ep={parallel.ep}", kind.exchanged
        of_sequences = f"{parallel.sharing} over cp={parallel.cp}", kind.shared
        for what, sent in (of_experts, of_sequences):
            if not any(sent.values()):
                continue
            ops = ", ".join(f"{size / 2**20:,.1f} in {op}" for op, size in sent.items())
            layers = costs.order.count(name) / parallel.pp
            turns = config.train.grad_accum_steps * parallel.slices
            step = sum(sent.values()) * layers * turns
            yield (
                f"{what}: MiB that a device sends for a layer and microbatch: {ops}; "
                f"{step / _GIB:,.1f} GiB in a step."
            )


def _ends(one: Estimate) -> str:
    return "shared" if one.plan.lockstep.vocab_parallel else "own"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
