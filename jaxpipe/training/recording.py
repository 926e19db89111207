"""Steps recorded by jax's profiler, for XProf, TensorBoard and Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxpipe.config import Config, first_line
from jaxpipe.runtime.directory import WriteGuard


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[None]:
    """Record what the body does, without its Python: operations are named by their part of a tick.

    The XPlane file and the one for Perfetto lie below `directory`. Raises `OSError` where they
    cannot be written, after the body.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a step is one call
    directory.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(str(directory), profiler_options=options)
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except RuntimeError as error:  # XLA's, of a full disk
            raise OSError(first_line(error)) from error


class Window:
    """The steps of a run that `log.profile_start` and `log.profile_steps` have recorded.

    Every process writes its own, into `<run.dir>/profile/process-<number>`. A context manager; a
    run that ends within the window keeps what it has.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        first, count = config.log.profile_start, config.log.profile_steps
        # The steps after which it begins and ends; a step 0 is there before each run.
        self._begin, self._end = (first - 1, first - 1 + count) if first else (-1, -1)
        if first:  # of the steps of a program all are recorded, or none
            each = config.train.fused_steps
            self._begin, self._end = self._begin // each * each, -(-self._end // each) * each
        self._directory = Path(config.run.dir) / "profile" / f"process-{jax.process_index()}"
        self._say, self._guard = say, WriteGuard(say)
        self._open = contextlib.ExitStack()
        self._recorded = ""  # what to say of the open recording

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def turns_at(self, step: int) -> bool:
        """Whether it begins or ends after this step, which the devices should then have done."""
        return step in (self._begin, self._end)

    def turn(self, step: int) -> None:
        """Begin or end, if it is after this step."""
        if self.turns_at(step):
            self._close()
        if step == self._begin:
            with self._guard.attempt(str(self._directory)):
                self._open.enter_context(recording(self._directory))
                self._recorded = f"steps from {step + 1} on are in {self._directory}"

    def _close(self) -> None:
        """End a recording that has begun, and say where it is if it could be written."""
        told, self._recorded = self._recorded, ""
        with self._guard.attempt(str(self._directory)):
            self._open.close()
            if told:
                self._say(told)
