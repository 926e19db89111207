"""Exports checkpoints for transformers while the run continues."""

import contextlib
import errno
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import Config
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage.errors import as_os_errors, retry
from jaxpipe.runtime.storage.files import open_path, remove_tree

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
        self._child: subprocess.Popen[str] | None = None  # that exports
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
        self._all_saved = threading.Event()  # every save is complete, or has failed

    def __enter__(self) -> "Exports":
        if self._every and processes.first():
            saved, exported = retry(self._find, str(self._exports), self._say)
            for step in saved:
                if step and step not in exported:
                    self.add(step)
            self._waits = self._last_step in saved
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._all_saved.set()
        self._steps.put(None)
        position.enter("export")
        with position.metered(self._movement):
            while kind is None and self._waits and self._thread.is_alive():
                self._thread.join(_LOOK_SECONDS)

    def add(self, step: int) -> None:
        """Export the checkpoint of this step once it is complete, if it is one to export."""
        self._waits = step == self._last_step
        if self._every and step % self._every == 0:
            self._steps.put(step)

    def _find(self) -> tuple[list[int], set[int]]:
        """Steps of the checkpoints, and of the exports; removes what a killed process has left."""
        with as_os_errors():
            for left in self._exports.glob(".*.partial-*"):
                remove_tree(left)
            saved = list_steps(self._checkpoints)
            done = {s for s in saved if (self._exports / str(s) / "config.json").exists()}
        return saved, done

    def _movement(self) -> Any:
        """What changes as long as an export reads, computes or writes; None if that is not known.

        It is what the kernel counts for the process: bytes, and for a store, whose bytes it does
        not count, the time that it computes.
        """
        if not (child := self._child):
            return self._steps.qsize()
        with contextlib.suppress(OSError):
            here = Path(f"/proc/{child.pid}")
            times = (here / "stat").read_text().rpartition(")")[2].split()[11:13]
            return (here / "io").read_text(), times, self._steps.qsize()
        return None

    def remove_after(self, last_step: int) -> None:
        """Remove the exports of steps after `last_step`, to which the run went back."""
        if self._every and processes.first():
            retry(partial(self._remove_later, last_step), str(self._exports), self._say)

    def _remove_later(self, last_step: int) -> None:
        with as_os_errors():
            folders = list(self._exports.iterdir()) if self._exports.is_dir() else []
        for folder in folders:
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

        def saved_steps() -> list[int]:
            return retry(lambda: list_steps(self._checkpoints), str(self._checkpoints), self._say)

        while not (saved := saved_steps()) or saved[-1] < step:
            if self._all_saved.is_set():
                return  # it could not be saved, which was said
            time.sleep(_LOOK_SECONDS)
        if step not in saved:
            return self._warn(step, "it is no longer kept: a larger checkpoint.keep")
        target = self._exports / str(step)
        words = [str(self._checkpoints / str(step)), str(target)]
        command = [sys.executable, "-m", "jaxpipe.checkpoint", "export", *words]

        def export() -> tuple[int, str, str]:
            remove_tree(target)
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            ) as self._child:  # fmt: skip
                printed, errors = self._child.communicate()
            code = self._child.returncode
            if code == ExitCode.NO_ANSWER:
                raise TimeoutError(errno.ETIMEDOUT, _last_line(errors))
            return code, printed, errors

        code, printed, errors = retry(export, str(self._exports), self._say)
        if code:
            self._warn(step, _last_line(errors) or f"exit code {code}")
        else:
            self._say(printed.strip())

    def _warn(self, step: int, reason: str) -> None:
        self._say(f"warning: step {step} could not be exported ({reason}): training goes on")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("error: ")
