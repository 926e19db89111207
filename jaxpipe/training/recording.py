"""Steps recorded by jax's profiler, for XProf, TensorBoard and Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxpipe.config import Config
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
    with jax.profiler.trace(str(directory), profiler_options=options):
        yield


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

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard.attempt(str(self._directory)):
            self._open.close()

    def turns_at(self, step: int) -> bool:
        """Whether it begins or ends after this step, which the devices should then have done."""
        return step in (self._begin, self._end)

    def turn(self, step: int) -> None:
        """Begin or end, if it is after this step."""
        if not self.turns_at(step):
            return
        with self._guard.attempt(str(self._directory)):
            self._open.close()
            if step == self._begin:
                self._open.enter_context(recording(self._directory))
                told = f"steps from {step + 1} on are in {self._directory}"
                self._open.callback(self._say, told)
