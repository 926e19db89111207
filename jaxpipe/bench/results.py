"""Results of `bench step`: the JSON file, and the tables that follow from it."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from jaxpipe.bench.options import markdown_table
from jaxpipe.bench.variants import PP, VARIANTS


class PeakMemory(msgspec.Struct):
    """Memory of the rank with the largest peak, in bytes: peak in a step, and before the step."""

    peak: int
    before: int


class StepMeasurements(msgspec.Struct):
    """Measurements at one number of microbatches.

    Names of steps are "jaxpipe single", "torch Schedule1F1B" and so on; `predicted` has the name of
    the schedule alone. Disturbed steps are missing.

    Attributes:
        microbatches: in a step.
        rounds: for each round, seconds of a step by name.
        predicted: for each round, the simulator's seconds, from ops timed before and after a step.
        tried: attempts, disturbed ones included.
        losses: of the first two steps.
        compile: seconds of the compiler.
        memory: of the rank with the largest peak.
        busy: for each round, CPU seconds of all processes of a step.
    """

    microbatches: int
    rounds: list[dict[str, float]]
    predicted: list[dict[str, float]]
    tried: dict[str, int]
    losses: dict[str, list[float]]
    compile: dict[str, float]
    memory: dict[str, PeakMemory]
    busy: list[dict[str, float]] = []

    def variants(self) -> list[str]:
        """Return the names of jaxpipe's schedules, in the order of measurement."""
        return [v for name in self.tried if (v := name.removeprefix("jaxpipe ")) in VARIANTS]

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of all undisturbed steps of that name."""
        return [seconds[name] for seconds in self.rounds if name in seconds]

    def efficiency(self, of: str, name: str) -> list[float]:
        """Return, for each round, half of the single-device step time over that step's time.

        Args:
            of: framework, "jaxpipe" or "torch".
            name: of the step, without the framework.
        """
        single = f"{of} single"
        return [
            seconds[single] / PP / seconds[f"{of} {name}"]
            for seconds in self.rounds
            if single in seconds and f"{of} {name}" in seconds
        ]

    def bubble(self, name: str) -> list[float]:
        """Return, for each round, the share of both cores' time in which the ranks were idle."""
        return [
            1 - used[name] / PP / seconds[name]
            for seconds, used in zip(self.rounds, self.busy)
            if name in seconds
        ]

    def predicted_efficiency(self, variant: str) -> list[float]:
        """Return, for each round, `efficiency` with the simulator's step time."""
        return [
            seconds["jaxpipe single"] / PP / said[variant]
            for seconds, said in zip(self.rounds, self.predicted)
            if "jaxpipe single" in seconds and variant in said
        ]

    def promise_kept(self, variant: str) -> list[float]:
        """Return, for each round, the simulator's step time over the measured step time."""
        return [
            said[variant] / seconds[f"jaxpipe {variant}"]
            for seconds, said in zip(self.rounds, self.predicted)
            if f"jaxpipe {variant}" in seconds and variant in said
        ]


class StepResult(msgspec.Struct):
    """One run of `bench step`.

    Attributes:
        date: of the run, ISO format.
        command: that repeats the run.
        versions: of Python and the frameworks.
        machine: processor and cores.
        tokens: in a microbatch.
        ops: every measurement of the ops: the fields of `OpSeconds`, and `update`.
        steps: by number of microbatches.
    """

    date: str
    command: str
    versions: dict[str, str]
    machine: str
    tokens: int
    ops: list[dict[str, object]]
    steps: list[StepMeasurements]

    @classmethod
    def read(cls, path: Path) -> "StepResult":
        """Read a file that `write` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def variants(self) -> list[str]:
        """Return the names of jaxpipe's schedules, in the order of measurement."""
        return list(dict.fromkeys(name for steps in self.steps for name in steps.variants()))


_COLUMNS = (
    "schedule", "M", "step, s", "tokens/s", "efficiency", "predicted", "predicted / measured",
    "bubble", "memory, MiB", "compiled in, s",
    "PyTorch's step, s", "its efficiency", "its bubble", "its memory, MiB",
)  # fmt: skip


def table(result: StepResult, *, spread: bool = True) -> str:
    """Return a Markdown table of medians over rounds; `spread` adds minimum and maximum."""
    rows = []
    for steps in result.steps:
        for name in ("single", "data parallel", *result.variants()):
            if steps.seconds(f"jaxpipe {name}"):
                cells = _jaxpipe_row(steps, name, steps.microbatches * result.tokens)
                cells += _peer_row(steps, VARIANTS[name].peer if name in VARIANTS else name)
                shown = [cell if spread else cell.partition(" (")[0] for cell in cells]
                rows.append([name, str(steps.microbatches), *shown])
    return markdown_table(_COLUMNS, rows)


def _jaxpipe_row(steps: StepMeasurements, name: str, tokens: int) -> list[str]:
    seconds = steps.seconds(f"jaxpipe {name}")
    compiled = steps.compile.get(f"jaxpipe {name}")
    return [
        _spread(seconds, 2),
        f"{tokens / median(seconds):,.0f}",
        "" if name == "single" else _spread(steps.efficiency("jaxpipe", name), 3),
        _spread(steps.predicted_efficiency(name), 3),
        _spread(steps.promise_kept(name), 3),
        "" if name == "single" else _spread(steps.bubble(f"jaxpipe {name}"), 3),
        _mebibytes(steps.memory.get(f"jaxpipe {name}")),
        "" if compiled is None else f"{compiled:.1f}",
    ]


def _peer_row(steps: StepMeasurements, peer: str) -> list[str]:
    seconds = steps.seconds(f"torch {peer}")
    memory = _mebibytes(steps.memory.get(f"torch {peer}"))
    if peer == "single":
        return [_spread(seconds, 2), "", "", memory]
    efficiency, bubble = steps.efficiency("torch", peer), steps.bubble(f"torch {peer}")
    return [_spread(seconds, 2), _spread(efficiency, 3), _spread(bubble, 3), memory]


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, median, max))
    return f"{middle} ({low}-{high})"


def _mebibytes(peak: PeakMemory | None) -> str:
    return "" if peak is None else f"{peak.peak / 2**20:,.0f}"
