"""The log that a run leaves."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

Value = float | list[Any]  # a number, or nested lists of numbers
_SCALARS = 64  # numbers of a list that TensorBoard still shows one by one


class MetricsLog:
    """`<directory>/metrics.jsonl`, one object a step, and TensorBoard event files beside it.

    A run resumed after `last_step` first drops what was logged past it, so every step stands once.
    Values are numbers or nested lists of them. Numbers that JSON cannot write (NaN, infinity) are
    null. TensorBoard has a scalar for every number of a small list, `counts/3/1`, and a histogram
    of a large one. A context manager.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, last_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        _keep_until(path, last_step)
        self._file = path.open("a", buffering=1)
        self._writer = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=last_step + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._writer:
            self._writer.close()

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Log one step's values."""
        finite = {name: _for_json(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | finite) + "\n")
        if self._writer:
            for name, value in values.items():
                self._show(name, np.asarray(value), step)

    def _show(self, name: str, value: np.ndarray, step: int) -> None:
        """One value in TensorBoard, whose histograms take finite numbers only."""
        if value.size <= _SCALARS:
            for index, number in np.ndenumerate(value):
                self._writer.add_scalar("/".join((name, *map(str, index))), number, step)
        elif np.isfinite(value).any():
            self._writer.add_histogram(name, value[np.isfinite(value)], step)


def _for_json(value: Value) -> Any:
    """The same with null for what JSON cannot write."""
    if isinstance(value, list):
        return [_for_json(part) for part in value]
    return value if math.isfinite(value) else None


def _keep_until(path: Path, last_step: int) -> None:
    """Rewrite a log without the steps after `last_step` and without a half-written line."""
    if not path.exists():
        return

    def step_of(line: str) -> Any:
        try:
            return json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError):
            return math.inf

    kept = [line for line in path.read_text().splitlines() if step_of(line) <= last_step]
    fresh = path.with_suffix(".jsonl.new")
    fresh.write_text("".join(f"{line}\n" for line in kept))
    fresh.replace(path)
