"""Exports checkpoints for transformers while the run continues."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import Config
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.storage import open_path

_LOOK_SECONDS = 0.5  # between two looks whether a checkpoint is complete


class Exports:
    """Exports checkpoints of a run to `<run.dir>/exports/<step>`; a context manager.

    The first process starts `python -m jaxpipe.checkpoint export` for each, one after the other. It
    reads the checkpoint from disk, a layer at a time, and uses no accelerator, so training does not
    wait for it. At the end of the run exports that are not complete are waited for. A failure is
    reported, and the run goes on.

    Args:
      config: of the run.
      say: prints a message.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._every, self._say = config.checkpoint.export_every, say
        self._checkpoints = open_path(config.run.dir) / "checkpoints"
        self._exports = open_path(config.run.dir) / "exports"
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
        self._ends = threading.Event()  # every save is complete, or has failed

    def __enter__(self) -> "Exports":
        if self._every and processes.first():
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._ends.set()
        self._steps.put(None)
        if kind is None:
            position.enter("export")
            self._thread.join()

    def add(self, step: int) -> None:
        """Export the checkpoint of this step once it is complete, if it is one to export."""
        if self._every and step % self._every == 0:
            self._steps.put(step)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            while step not in list_steps(self._checkpoints) and not self._ends.is_set():
                time.sleep(_LOOK_SECONDS)
            self._export(step)

    def _export(self, step: int) -> None:
        target = self._exports / str(step)
        if (target / "config.json").exists():  # written before the run was resumed
            return
        words = [str(self._checkpoints / str(step)), str(target)]
        command = [sys.executable, "-m", "jaxpipe.checkpoint", "export", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        if done.returncode:
            reason = _last_line(done.stderr) or f"exit code {done.returncode}"
            self._say(f"warning: step {step} could not be exported ({reason}): training goes on")
        else:
            self._say(done.stdout.strip())


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("error: ")
