"""A plan as a table for people and as plain types for programs."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from jaxpipe.config import Config
from jaxpipe.planning.advice import Advice
from jaxpipe.planning.candidates import with_variant
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.estimate import Estimate, gain_over
from jaxpipe.planning.cost.hardware import OpSeconds
from jaxpipe.planning.settings import changed, words_of
from jaxpipe.schedules import FAMILIES

_GIB = 2**30
_OF_VARIANT = (  # settings that choose a schedule
    "schedule", "schedule_file", "virtual_stages", "memory_limit", "in_flight", "breadth",
    "layer_split", "unroll_layers",
)  # fmt: skip


class Column(NamedTuple):
    """A column of the table, shown if some schedule has a value for it."""

    name: str
    legend: str
    value: Callable[[Estimate], float | str | None]
    form: str = ""

    def text(self, one: Estimate) -> str:
        """The value as it is printed."""
        value = self.value(one)
        return "" if value is None else format(value, self.form)


_TOTAL = Column("GiB", "bytes of a device (! too much)", lambda one: one.bytes.total / _GIB, ".1f")
_COLUMNS = (
    Column(
        "schedule", "* what the configuration names, as it would run",
        lambda one: one.label + " *" * one.configured,
    ),
    Column(
        "head", "embedding and head: of the end stages alone (own), or shared over pp (shared)",
        lambda one: _place_of_embed_head(one),
    ),
    Column("s/step", "seconds of a step", lambda one: one.seconds, ".4g"),
    Column(
        "tokens/s/GPU", "tokens per second and device",
        lambda one: one.tokens_per_second_per_gpu, ",.0f",
    ),
    Column(
        "TFLOP/s", "model FLOPs per second and device: 6 for a weight and token, 12 H K S for a "
        "layer's attention and token, without what is computed again",
        lambda one: one.tflops_per_gpu, ".0f",
    ),
    Column(
        "MFU", "these over the device's dense bfloat16 peak, also in fp8",
        lambda one: one.mfu, ".1%",
    ),
    Column(
        "days/T", "days for a trillion tokens",
        lambda one: 1e12 / one.tokens_per_second / 86400, ",.3g",
    ),
    Column(
        "bubble", "idle share of ranks that run asynchronously, of the whole step",
        lambda one: one.report.bubble_global, "z.1%",
    ),
    Column(
        "scan", "idle share of the scan that the executor runs",
        lambda one: one.report.bubble_scan, "z.1%",
    ),
    Column("live", "largest number of live (microbatch, stage) pairs", lambda one: one.live, "d"),
    _TOTAL,
    Column("stored", "activations in GiB", lambda one: one.bytes.activations / _GIB, ".1f"),
    Column(
        "host", "GiB of its host's memory (train.offload_layers, train.offload_moments)",
        lambda one: one.bytes.host / _GIB or None, ".1f",
    ),
    Column(
        "exposed", "share of the step for which compute waits for other replicas, over ep or cp",
        lambda one: one.exposed / one.seconds or None, ".1%",
    ),
    Column(
        "saved", "share of the scan's time that N overlapping steps save, with --fused-steps N",
        lambda one: one.saved, "z.1%",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What every schedule of a configuration would cost, and the advice.

    Attributes:
      refused: for schedules that are not possible, the reason by label.
      memory: bytes of a device that a plan may fill.
    """

    config: Config
    estimates: tuple[Estimate, ...]
    refused: dict[str, str]
    advice: Advice
    seconds: OpSeconds
    memory: float

    def show(self, console: Console) -> None:
        """Print the table, its legend, the reasons of refused schedules, and the advice."""
        console.print(self.summary)
        console.print(self._table())
        legend = " ".join(f"{column.name}: {column.legend}." for column in self.columns)
        for text in (legend, *self.refusals()):
            console.print(text, style="dim", soft_wrap=True)
        for sentence in self.sentences():
            console.print(sentence, soft_wrap=True)

    @property
    def summary(self) -> str:
        """One line on the sizes of the model, the mesh and the batch."""
        parallel, train = self.config.parallel, self.config.train
        ticks = {str(one.plan.lockstep.transfer_ticks) for one in self.estimates}
        model = self.config.model
        every, active = model.parameter_count(), model.active_parameter_count()
        of_token = f" ({active:,} for a token)" if active < every else ""
        return (
            f"{every:,} parameters{of_token}, {parallel.mesh}, "
            f"{train.grad_accum_steps} microbatches of {train.microbatch_size} x "
            f"{train.seq_len} tokens, {train.rematerialisation}, transfers take "
            f"{' or '.join(sorted(ticks))} ticks"
        )

    @property
    def columns(self) -> list[Column]:
        """The columns that some schedule has a value for."""
        return [
            column
            for column in _COLUMNS
            if any(column.value(one) is not None for one in self.estimates)
        ]

    def refusals(self) -> Iterator[str]:
        """Yield a sentence on every reason why schedules are not possible."""
        for why in dict.fromkeys(self.refused.values()):
            labels = ", ".join(label for label, reason in self.refused.items() if reason == why)
            yield f"not possible: {labels}: {why}"

    def sentences(self) -> Iterator[str]:
        """Yield the advice: which schedule to take, the traffic of the network, what to change."""
        if not any(one.configured for one in self.estimates):
            yield (
                f"parallel.schedule={self.config.parallel.schedule!r}, which the configuration "
                f"names, is not possible, and `python -m jaxpipe.train` refuses it: take another"
            )
        if self.advice.best:
            fastest = next(one for one in self.estimates if one.label == self.advice.best)
            summary = FAMILIES[fastest.variant.family].summary
            if fastest.variant.in_flight:
                summary = summary.partition(":")[0]  # what it holds is another number then
            yield (
                f"fastest within the {self.memory / _GIB:.1f} GiB of a device that a plan fills: "
                f"{self.advice.best} "
                f"({summary}){self._gain(fastest)}"
            )
        yield from _traffic(self.config)
        yield from self.advice.sentences

    def _gain(self, fastest: Estimate) -> str:
        """Return the end of a sentence: the gain over the configured schedule, and the settings."""
        own = next((one for one in self.estimates if one.configured), None)
        if own is fastest:
            return ", which the configuration names"
        named = with_variant(self.config, fastest.variant)
        unrolled = fastest.plan.config.parallel.unroll_layers
        named = replace(named, parallel=replace(named.parallel, unroll_layers=unrolled))
        words = words_of(changed(self.config, named, {"parallel": _OF_VARIANT}))
        gain = "the configured schedule is not possible"
        if own:
            gain = gain_over(own, fastest, self.memory)
        return f"; {gain}. To run it: {words}"

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for column in self.columns:
            is_text = column.name in ("schedule", "head")
            table.add_column(column.name, justify="left" if is_text else "right", no_wrap=True)
        for one in sorted(self.estimates, key=lambda e: (not e.configured, e.seconds)):
            fits = one.bytes.total <= self.memory
            chosen = one.label == self.advice.best
            marks = {_TOTAL: " " if fits else "!"}
            table.add_row(
                *(column.text(one) + marks.get(column, "") for column in self.columns),
                style="bold" if chosen else "" if fits else "dim",
            )
        return table

    def as_json(self) -> dict[str, Any]:
        """The plan in plain types."""
        rows = [
            {
                "schedule": one.label,
                "configured": one.configured,
                "embed_head": _place_of_embed_head(one),
                "fits": one.bytes.total <= self.memory,
                "tokens_per_second": one.tokens_per_second,
                "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
                "step_seconds": one.seconds,
                "tflops_per_gpu": one.tflops_per_gpu,
                "mfu": one.mfu,
                "gib": one.bytes.total / _GIB,
                **asdict(one.report),
                "bytes": asdict(one.bytes) | {"total": one.bytes.total},
                "live": one.live,
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
        of_kind = f" of kind {name}" if len(costs.kinds) > 1 else ""
        of_experts = f"all-to-alls over ep={parallel.ep}", kind.exchanged
        of_sequences = f"{parallel.sharing} over cp={parallel.cp}", kind.shared
        for what, sent in (of_experts, of_sequences):
            if not any(sent.values()):
                continue
            ops = ", ".join(f"{size / 2**20:,.1f} in {op}" for op, size in sent.items())
            layers = costs.order.count(name) / parallel.pp
            step = sum(sent.values()) * layers * config.scheduled_microbatches
            yield (
                f"{what}: MiB that a device sends for a layer{of_kind} and microbatch: {ops}; "
                f"{step / _GIB:,.1f} GiB in a step."
            )


def _place_of_embed_head(one: Estimate) -> str:
    return "shared" if one.plan.lockstep.vocab_parallel else "own"
