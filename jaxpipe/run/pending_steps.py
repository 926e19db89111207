"""Dispatched steps whose metrics have not been read."""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpipe.data.batches import DocumentLengths
from jaxpipe.run.start import DataPosition
from jaxpipe.training.step_metrics import host_total


@dataclass(frozen=True)
class Dispatched:
    """A dispatched step whose metrics have not been read."""

    step: int
    program: range  # numbers of all steps of its program
    before: DataPosition  # data position before the step
    after: DataPosition
    contents: DocumentLengths | None  # documents and padding of its rows; None: no padding
    metrics: dict[str, Any]  # stacked over the steps of its program if there are several
    started: float  # host time before its batch was read [s]
    spent: dict[str, float]  # host time since the previous step by purpose [s]
    first: bool  # whether the time of its program includes compilation

    def numbers(self) -> dict[str, Any]:
        """Wait for the step; return its metrics as numbers or nested lists."""
        values = {name: np.asarray(value) for name, value in self.metrics.items()}
        if len(self.program) > 1:
            values = {name: value[self.program.index(self.step)] for name, value in values.items()}
        targets = host_total(values["target_tokens"])
        return {name: value.tolist() for name, value in values.items()} | {"target_tokens": targets}


class UnreadSteps:
    """A queue of dispatched steps whose metrics have not been read, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[Dispatched] = deque()
        self._read_last = -math.inf  # host time when the previous program was read [s]
        self._seconds = 0.0  # time of a step of the program read last

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> int:
        """The number of the oldest step."""
        return self._steps[0].step

    def add(self, dispatched: Dispatched) -> None:
        """Append a step."""
        self._steps.append(dispatched)

    def read(self) -> tuple[Dispatched, dict[str, Any], float]:
        """Wait for the oldest step; return it, its metrics and its time [s].

        The time counts from the end of the previous step, or from the step's own start if that is
        later. The times therefore add up to the run's time without held-out losses and saves.
        Steps of one program get equal shares of its time.
        """
        dispatched = self._steps.popleft()
        values = dispatched.numbers()
        if dispatched.step == dispatched.program.start:
            before, self._read_last = self._read_last, time.perf_counter()
            elapsed = self._read_last - max(before, dispatched.started)
            self._seconds = elapsed / len(dispatched.program)
        return dispatched, values, self._seconds
