"""The log that a run leaves."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.training.boards import Board

Value = float | list[Any]  # a number, or nested lists of numbers
_SCALARS = 64  # numbers of a list that boards still show one by one


class MetricsLog:
    """`<directory>/metrics.jsonl`, one object a step, and the boards that show the same.

    A run resumed after `last_step` first drops what was logged past it, so every step stands once.
    Values are numbers or nested lists of them. Numbers that JSON cannot write (NaN, infinity) are
    null. A board has a scalar for every number of a small list, `counts/3/1`, and a histogram of a
    large one. A context manager, which closes the boards.
    """

    def __init__(self, directory: Path, *, last_step: int, boards: Sequence[Board] = ()):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        _keep_until(path, last_step)
        self._file = path.open("a", buffering=1)
        self._boards = boards

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for board in self._boards:
            board.close()

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Log one step's values."""
        finite = {name: _for_json(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | finite) + "\n")
        for board in self._boards:
            board.show(step, dict(_for_boards(values)))


def _for_boards(values: dict[str, Value]) -> Iterator[tuple[str, float | np.ndarray]]:
    """Scalars, and the finite numbers of what is a histogram, by name."""
    for name, value in values.items():
        array = np.asarray(value)
        if array.size <= _SCALARS:
            for index, number in np.ndenumerate(array):
                value = float(number) if index else number.item()  # boards keep a lone count exact
                yield "/".join((name, *map(str, index))), value
        elif np.isfinite(array).any():
            yield name, array[np.isfinite(array)]


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
