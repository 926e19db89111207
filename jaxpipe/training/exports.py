"""Exports checkpoints for transformers while the run continues."""

import contextlib
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
from jaxpipe.runtime.storage import open_path, remove_tree

_LOOK_SECONDS = 0.5  # between two looks whether a checkpoint is complete


class Exports:
    """Exports checkpoints of a run to `<run.dir>/exports/<step>`; a context manager.

    The first process starts `python -m jaxpipe.checkpoint export` for each, one after the other. It
    reads the checkpoint from disk, a layer at a time, and uses no accelerator, so training does not
    wait for it. After the last step exports that are not complete are waited for; a run that ends
    before leaves them to the start that goes on. A failure is reported, and the run goes on.

    Args:
      config: of the run.
      say: prints a message.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._every, self._say = config.checkpoint.export_every, say
        self._checkpoints = open_path(config.run.dir) / "checkpoints"
        self._exports = open_path(config.run.dir) / "exports"
        self._last_step, self._waits = config.train.steps, False
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
        self._all_saved = threading.Event()  # every save is complete, or has failed

    def __enter__(self) -> "Exports":
        if self._every and processes.first():
            for left in self._exports.glob(".*.partial-*"):  # by a process that was killed
                remove_tree(left)
            saved = list_steps(self._checkpoints)
            for step in saved:
                if step and not (self._exports / str(step) / "config.json").exists():
                    self.add(step)
            self._waits = self._last_step in saved
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._all_saved.set()
        self._steps.put(None)
        while kind is None and self._waits and self._thread.is_alive():
            position.enter("export")  # the time limit is of an export that writes nothing
            written = self._written()
            while self._thread.is_alive() and self._written() == written:
                self._thread.join(_LOOK_SECONDS)

    def add(self, step: int) -> None:
        """Export the checkpoint of this step once it is complete, if it is one to export."""
        self._waits = step == self._last_step
        if self._every and step % self._every == 0:
            self._steps.put(step)

    def _written(self) -> tuple[int, int]:
        """Exports to come, and bytes of the files of that which is being written."""
        sizes = 0
        for path in self._exports.glob(".*.partial-*/*"):
            with contextlib.suppress(OSError):  # it is just complete
                sizes += path.stat().st_size
        return self._steps.qsize(), sizes

    def remove_after(self, last_step: int) -> None:
        """Remove the exports of steps after `last_step`, to which the run went back."""
        if not (self._every and processes.first() and self._exports.is_dir()):
            return
        for folder in self._exports.iterdir():
            if folder.name.isdigit() and int(folder.name) > last_step:
                remove_tree(folder)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._export(step)
            except OSError as error:
                self._warn(step, str(error))

    def _export(self, step: int) -> None:
        """Export one checkpoint, in place of an older export of a step with this number."""
        while not (saved := list_steps(self._checkpoints)) or saved[-1] < step:
            if self._all_saved.is_set():
                return  # it could not be saved, which was said
            time.sleep(_LOOK_SECONDS)
        if step not in saved:
            return self._warn(step, "it is no longer kept: a larger checkpoint.keep")
        target = self._exports / str(step)
        remove_tree(target)
        words = [str(self._checkpoints / str(step)), str(target)]
        command = [sys.executable, "-m", "jaxpipe.checkpoint", "export", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        if done.returncode:
            self._warn(step, _last_line(done.stderr) or f"exit code {done.returncode}")
        else:
            self._say(done.stdout.strip())

    def _warn(self, step: int, reason: str) -> None:
        self._say(f"warning: step {step} could not be exported ({reason}): training goes on")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("error: ")
