"""A measured process: named steps, run by commands from stdin. Imports only the standard library.

A command is a line of JSON, such as `{"do": "step", "name": key}`, and so is its answer. Times are
of the machine's monotonic clock, which all processes share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class StepWorker:
    """The process's steps by name; a subclass adds commands that prepare them.

    A step is a function that returns its loss, or None.
    """

    def __init__(self) -> None:
        self.steps: dict[str, Callable[..., float | None]] = {}

    def step(self, name: str, **how: Any) -> dict[str, Any]:
        """Run a step; return its begin and end [seconds] and its loss."""
        begin = time.monotonic()
        loss = self.steps[name](**how)
        return {"begin": begin, "end": time.monotonic(), "loss": loss}

    def step_twice(self, name: str) -> dict[str, Any]:
        """Return what `step` returns for the second of two steps, with both losses."""
        first, second = self.step(name), self.step(name)
        return second | {"losses": [first["loss"], second["loss"]]}

    def drop(self, name: str) -> dict[str, Any]:
        """Delete a step and its state."""
        del self.steps[name]
        return {}


def serve(start: Callable[..., StepWorker], version: str) -> None:
    """Start a worker and execute commands until stdin ends; `do` names a method.

    Args:
        start: returns the worker, given this process's `rank`, the number of processes `size`, and
            a free `port` of rank 0.
        version: of the framework, for the first answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    worker = start(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(reply), file=answers, flush=True)
