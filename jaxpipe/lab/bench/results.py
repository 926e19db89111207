"""Results of `bench step`: what is measured of a step, and the table that follows from it."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from jaxpipe.lab.bench.options import markdown_table
from jaxpipe.lab.bench.variants import PP, peer_of

_COLUMNS = (
    "schedule", "M", "step, s", "tokens/s", "efficiency", "predicted", "predicted / measured",
    "bubble", "compiled in, s", "PyTorch's step, s", "its efficiency", "its bubble",
)  # fmt: skip


class MeasuredStep(msgspec.Struct):
    """Measurements of one step; rounds in which every attempt was disturbed are missing.

    Attributes:
        framework: "jaxpipe" or "torch".
        name: "single", "data parallel", or a schedule of the framework.
        microbatches: of the step.
        losses: of the first two steps.
        compile: seconds of the compiler; None: there is none.
        seconds: of the step, by round.
        busy: CPU seconds of all its processes, by round.
        predicted: the simulator's seconds, by round.
    """

    framework: str
    name: str
    microbatches: int
    losses: list[float] = []
    compile: float | None = None
    seconds: dict[int, float] = {}
    busy: dict[int, float] = {}
    predicted: dict[int, float] = {}

    @property
    def label(self) -> str:
        """Framework and name."""
        return f"{self.framework} {self.name}"

    def bubble(self) -> list[float]:
        """Return, for each round, the share of both cores' time in which the ranks were idle."""
        return [1 - used / PP for used in ratios(self.busy, self.seconds)]


def ratios(over: Mapping[int, float], under: Mapping[int, float]) -> list[float]:
    """Return the ratio in each round that has both."""
    return [value / under[number] for number, value in over.items() if number in under]


def table(steps: Sequence[MeasuredStep], tokens: int) -> str:
    """Return a Markdown table of medians over rounds, with minimum and maximum.

    Args:
        steps: measured.
        tokens: in a microbatch.
    """
    known = {(step.microbatches, step.label): step for step in steps}
    rows = []
    for step in steps:
        if step.framework == "jaxpipe" and step.seconds:
            peer = known.get((step.microbatches, f"torch {peer_of(step.name) or step.name}"))
            compiled = "" if step.compile is None else f"{step.compile:.1f}"
            rate = step.microbatches * tokens / median(step.seconds.values())
            seconds, efficiency, bubble = _timed(step, known)
            rows.append([
                step.name, str(step.microbatches), seconds, f"{rate:,.0f}", efficiency,
                _spread(_efficiency(step.predicted, known[step.microbatches, "jaxpipe single"])),
                _spread(ratios(step.predicted, step.seconds)), bubble, compiled,
                *(_timed(peer, known) if peer else [""] * 3),
            ])  # fmt: skip
    return markdown_table(_COLUMNS, rows)


def _timed(step: MeasuredStep, known: Mapping[tuple[int, str], MeasuredStep]) -> list[str]:
    """Return the cells of a step's seconds, efficiency and bubble."""
    seconds = _spread(step.seconds.values(), 2)
    if step.name == "single":
        return [seconds, "", ""]
    single = known[step.microbatches, f"{step.framework} single"]
    return [seconds, _spread(_efficiency(step.seconds, single)), _spread(step.bubble())]


def _efficiency(seconds: Mapping[int, float], single: MeasuredStep) -> list[float]:
    """Return, for each round, half of the single-device step time over these seconds."""
    return [ratio / PP for ratio in ratios(single.seconds, seconds)]


def _spread(values: Collection[float], digits: int = 3) -> str:
    if not values:
        return ""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, median, max))
    return f"{middle} ({low}-{high})"
