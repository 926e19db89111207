"""Efficiencies from rounds of steps: every ratio is of steps of one round, then their median."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from jaxpipe.bench.steps import Rounds
from jaxpipe.bench.workload import VARIANTS, OpTimes
from jaxpipe.schedule import Op, Schedule, simulate

PP = 2
_COLUMNS = (
    "schedule",
    "M",
    "measured",
    "predicted",
    "measured / predicted",
    "PyTorch",
    "kept / tried",
)


def lockstep_seconds(variant: str, schedule: Schedule, times: OpTimes, layers: int) -> float:
    """Seconds of a step as the scan runs it, from the seconds of its ops."""
    chosen = VARIANTS[variant]
    actions = [action for order in schedule.ranks for cell in order for action in cell.actions]
    split = any(action.op is Op.B for action in actions)
    report = simulate(
        schedule,
        chosen.costs(times, layers, schedule.pp, split=split),
        in_flight=chosen.in_flight,
        vocab_parallel=chosen.vocab_parallel,
    )
    return report.lockstep_makespan


@dataclass(frozen=True)
class Row:
    """One schedule with one number of microbatches, and the rounds that its steps were in.

    A round has the seconds of `jaxpipe single`, `jaxpipe <variant>`, `torch single`, `torch
    <class>`, and `ops`, an `OpTimes`.
    """

    variant: str
    schedule: Schedule
    layers: int  # of the model
    rounds: Rounds

    def measured(self) -> list[float]:
        """Efficiency in each round that has both steps."""
        return self._ratios("jaxpipe single", f"jaxpipe {self.variant}")

    def predicted(self) -> list[float]:
        """The simulator's, from each round's ops and single step."""
        return self._ratios("jaxpipe single", "ops", self._lockstep)

    def kept_promise(self) -> list[float]:
        """Measured over predicted: each round's lockstep over its step."""
        step = f"jaxpipe {self.variant}"
        return [
            self._lockstep(found["ops"]) / found[step]
            for found in self.rounds.rounds
            if "ops" in found and step in found
        ]

    def torch(self) -> list[float]:
        """PyTorch's efficiency, against its own single-device step."""
        return self._ratios("torch single", f"torch {VARIANTS[self.variant].peer}")

    def _lockstep(self, times: OpTimes) -> float:
        return lockstep_seconds(self.variant, self.schedule, times, self.layers)

    def _ratios(
        self, single: str, pipeline: str, seconds: Callable[[Any], float] = float
    ) -> list[float]:
        return [
            found[single] / PP / seconds(found[pipeline])
            for found in self.rounds.rounds
            if single in found and pipeline in found
        ]

    def cells(self) -> list[str]:
        """The row as text."""
        numbers = self.measured(), self.predicted(), self.kept_promise(), self.torch()
        kept, tried = 0, 0
        for name in ("jaxpipe single", f"jaxpipe {self.variant}"):
            kept, tried = kept + len(self.rounds.kept(name)), tried + self.rounds.tried[name]
        return [self.variant, str(self.schedule.microbatches), *map(_with_spread, numbers),
                f"{kept} / {tried}"]  # fmt: skip

    def json(self) -> dict[str, Any]:
        """The row for the results file: medians and every kept number."""
        ratios = {
            "measured": self.measured(),
            "predicted": self.predicted(),
            "measured_over_predicted": self.kept_promise(),
            "torch": self.torch(),
        }
        return {
            "schedule": self.variant,
            "microbatches": self.schedule.microbatches,
            "torch_schedule": VARIANTS[self.variant].peer,
            **{name: _median(values) for name, values in ratios.items()},
            "of_each_round": {n: [round(v, 4) for v in values] for n, values in ratios.items()},
        }


def table(rows: Sequence[Row]) -> str:
    """The rows in markdown: medians over the rounds, least and largest in brackets."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines)


def rounds_json(rounds: Rounds) -> dict[str, Any]:
    """Every kept answer by name, and how often each was tried."""
    return {
        name: {"kept": [_plain(answer) for answer in rounds.kept(name)], "tried": tried}
        for name, tried in rounds.tried.items()
    }


def _plain(answer: Any) -> Any:
    numbers = msgspec.to_builtins(answer)
    if isinstance(numbers, dict):
        return {name: round(value, 6) for name, value in numbers.items()}
    return round(numbers, 4)


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None


def _with_spread(values: Sequence[float]) -> str:
    if not values or math.isnan(values[0]):
        return "-"
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
