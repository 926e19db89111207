"""The log of a run: metrics.jsonl and the other loggers."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.run.watch.loggers import Logger
from jaxpipe.runtime.storage.directory import AppendedFile, WriteGuard
from jaxpipe.runtime.storage.files import write_whole

MetricValue = float | list[Any]  # a number, or nested lists of numbers
_STEP = re.compile(rb'\{"step": (\d{1,18}),')  # how a line begins
_SCALARS = 64  # a list of at most so many numbers is logged as scalars, a longer one as a histogram


class MetricsLog:
    """Writes metrics to `<directory>/metrics.jsonl` and to loggers; a context manager.

    The file has one JSON object per step. A run resumed after `last_step` first drops later
    records, so every step is there once. Values are numbers or nested lists of numbers; NaN and
    infinity become null. Loggers get a scalar for every number of a small list, such as
    `counts/3/1`, and a histogram of a large list. `guard` reports records that cannot be written;
    they are written once there is room. `check_owner` is called before every step's record. On exit
    the loggers are closed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        last_step: int,
        loggers: Sequence[Logger] = (),
        guard: WriteGuard | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        self._check_owner = check_owner
        self._path = directory / "metrics.jsonl"
        self._file = self._opened(last_step)
        self._guard, self._loggers = guard or WriteGuard(print), loggers
        with self._guard.attempt(str(self._path)):
            self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard.attempt(str(self._path)):
            self._file.close()
        if self._file.lost:
            self._guard.say(f"warning: {self._path} lacks {self._file.lost} steps of this run")
        for logger in self._loggers:
            with self._guard.attempt(logger.name):
                logger.close()

    def rewind(self, last_step: int) -> None:
        """Drop the records after `last_step`, from which the run resumes."""
        with self._guard.attempt(str(self._path)):
            self._file.close()
        self._file = self._opened(last_step)
        for logger in self._loggers:
            with self._guard.attempt(logger.name):
                logger.rewind(last_step)

    def _opened(self, last_step: int) -> AppendedFile:
        return AppendedFile(self._path, lambda: _keep_until(self._path, last_step))

    def write(self, step: int, values: dict[str, MetricValue]) -> None:
        """Log one step's values."""
        self._check_owner()
        finite = {name: _for_json(value) for name, value in values.items()}
        with self._guard.attempt(str(self._path)):
            self._file.append(f"{json.dumps({'step': step} | finite)}\n".encode())
        for logger in self._loggers:
            with self._guard.attempt(logger.name):
                logger.show(step, dict(_for_loggers(values)))


def _for_loggers(values: dict[str, MetricValue]) -> Iterator[tuple[str, float | np.ndarray]]:
    """Yield (name, scalar), and (name, finite numbers) for histograms."""
    for name, value in values.items():
        array = np.asarray(value)
        if array.size <= _SCALARS:
            for index, number in np.ndenumerate(array):
                value = float(number) if index else number.item()  # int stays exact in loggers
                yield "/".join((name, *map(str, index))), value
        elif np.isfinite(array).any():
            yield name, array[np.isfinite(array)]


def _for_json(value: MetricValue) -> Any:
    """The value with None for NaN and infinity, which JSON cannot write."""
    if isinstance(value, list):
        return [_for_json(part) for part in value]
    return value if math.isfinite(value) else None


def _keep_until(path: Path, last_step: int) -> None:
    """Drop the steps after `last_step` and damaged lines from a log.

    A crash may truncate a line, or the file system may fill it with other bytes. Steps are in
    order, so the kept lines usually are the start of the file; truncation then needs no disk space.
    """
    if not path.exists():
        return

    def is_kept(line: bytes) -> bool:
        if begin := _STEP.match(line):  # as written here: parsing all of a long log takes minutes
            if int(begin[1]) > last_step:
                return False
            if line.endswith(b"}\n"):
                return True
        try:
            step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        return isinstance(step, int) and step <= last_step

    offset = end = 0  # of the lines that are read, of those that are kept
    is_start = True
    with path.open("rb") as file:
        for line in file:
            if is_kept(line):
                is_start &= end == offset and line.endswith(b"\n")
                end = offset + len(line)
            offset += len(line)
    if is_start and end < offset:
        os.truncate(path, end)
    elif not is_start:
        with path.open("rb") as file:
            kept = b"".join(line.rstrip(b"\n") + b"\n" for line in file if is_kept(line))
        write_whole(path, kept)
