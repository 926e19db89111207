"""The log that a run leaves."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.runtime.directory import AppendedFile, WriteGuard, write_whole
from jaxpipe.training.boards import Board

Value = float | list[Any]  # a number, or nested lists of numbers
_SCALARS = 64  # numbers of a list that boards still show one by one


class MetricsLog:
    """`<directory>/metrics.jsonl`, one object a step, and the boards that show the same.

    A run resumed after `last_step` first drops what was logged past it, so every step stands once.
    Values are numbers or nested lists of them. Numbers that JSON cannot write (NaN, infinity) are
    null. A board has a scalar for every number of a small list, `counts/3/1`, and a histogram of a
    large one. What cannot be written is reported by `guard` and written once there is room. A
    context manager, which closes the boards.
    """

    def __init__(
        self,
        directory: Path,
        *,
        last_step: int,
        boards: Sequence[Board] = (),
        guard: WriteGuard | None = None,
    ):
        self._path = directory / "metrics.jsonl"
        self._file = AppendedFile(self._path, lambda: _keep_until(self._path, last_step))
        self._guard, self._boards = guard or WriteGuard(print), boards
        with self._guard.attempt(str(self._path)):
            self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard.attempt(str(self._path)):
            self._file.close()
        if self._file.lost:
            self._guard.say(f"warning: {self._path} lacks {self._file.lost} steps of this run")
        for board in self._boards:
            with self._guard.attempt(board.name):
                board.close()

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Log one step's values."""
        finite = {name: _for_json(value) for name, value in values.items()}
        with self._guard.attempt(str(self._path)):
            self._file.append(f"{json.dumps({'step': step} | finite)}\n".encode())
        for board in self._boards:
            with self._guard.attempt(board.name):
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
    """Drop from a log the steps after `last_step` and lines that are damaged.

    Damaged are lines cut short by a crash, or that a file system filled with other bytes. Steps are
    in order, so the rest is mostly the beginning of the file, which takes no room to keep.
    """
    if not path.exists():
        return

    def is_kept(line: bytes) -> bool:
        try:
            step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        return isinstance(step, int) and step <= last_step

    content = path.read_bytes()
    kept = b"".join(line + b"\n" for line in content.split(b"\n") if is_kept(line))
    if content.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_whole(path, kept)
