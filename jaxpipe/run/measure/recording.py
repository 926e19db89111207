"""Recording of steps with jax's profiler, for XProf, TensorBoard and Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxpipe.config import Config, first_line
from jaxpipe.runtime import position
from jaxpipe.runtime.storage.directory import WriteGuard
from jaxpipe.runtime.storage.spool import local_folder
from jaxpipe.training.fused import round_to_programs


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[None]:
    """Record the body with the profiler, without Python frames.

    Operations have the names of their scopes within a tick. The XPlane and Perfetto files are below
    `directory`. Raises `OSError`, after the body, where they cannot be written.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a step is one call, so Python frames show nothing
    directory.mkdir(parents=True, exist_ok=True)
    with _as_os_errors():
        jax.profiler.start_trace(str(directory), profiler_options=options)
    try:
        yield
    finally:
        with _as_os_errors():
            jax.profiler.stop_trace()


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # raised by XLA, for example if the disk is full
        raise OSError(first_line(error)) from error


class RecordingWindow:
    """Records the steps given by `log.profile_start` and `log.profile_steps`; a context manager.

    Every process writes its recording to `<run.dir>/profile/process-<number>`. A run that ends
    within the window keeps the steps recorded so far.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        first, count = config.log.profile_start, config.log.profile_steps
        # The recording starts after step `_begin` and ends after step `_end`; -1: never.
        self._begin = self._end = -1
        if first:
            steps = round_to_programs(config.train, range(first, first + count))
            self._begin, self._end = steps.start - 1, steps.stop - 1
        self._directory = (
            local_folder(config.run.dir) / "profile" / f"process-{jax.process_index()}"
        )
        self._say, self._guard = say, WriteGuard(say)
        self._open = contextlib.ExitStack()
        self._recorded = ""  # message to print when the open recording ends

    def __enter__(self) -> "RecordingWindow":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def turns_at(self, step: int) -> bool:
        """Whether the recording starts or ends after `step`; the devices should then be idle."""
        return step in (self._begin, self._end)

    def turn(self, step: int) -> None:
        """Start or end the recording if that is due after `step`."""
        if self.turns_at(step):
            position.enter("profile", step)
            self._close()
        if step == self._begin:
            with self._guard.attempt(str(self._directory)):
                self._open.enter_context(recording(self._directory))
                self._recorded = f"steps from {step + 1} on are in {self._directory}"

    def _close(self) -> None:
        """End an open recording and report its path, if it could be written."""
        told, self._recorded = self._recorded, ""
        with self._guard.attempt(str(self._directory)):
            self._open.close()
            if told:
                self._say(told)
