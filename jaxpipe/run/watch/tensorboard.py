"""TensorBoard event files of a run's metrics."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpipe.config import Config
from jaxpipe.run.watch.loggers import Shown
from jaxpipe.runtime.storage.directory import AppendedFile
from jaxpipe.runtime.storage.spool import local_folder

_NAME = "events.out.tfevents"


class TensorBoard:
    """A logger that writes event files to `<run.dir>/tensorboard`.

    A START event makes TensorBoard discard earlier events of steps after `last_step`. Events are
    TFRecord records. tensorboardX's own writer is not used: it writes in a thread, and waits for it
    forever once the thread has died of a full disk.
    """

    def __init__(self, config: Config, last_step: int):
        directory = local_folder(config.run.dir) / "tensorboard"
        self.name = str(directory)
        # TensorBoard reads files in the order of their names, whatever the clock of a start was.
        older = [int(path.name.split(".")[3]) for path in directory.glob(f"{_NAME}.[0-9]*.*")]
        number = max(int(time.time()), max(older, default=0) + 1)
        name = f"{_NAME}.{number}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._is_new = True
        self._starts_after: int | None = last_step

    def show(self, step: int, values: Shown) -> None:
        """Write one step's values as scalars and histograms."""
        with _without_torch():
            from jaxpipe.run.watch import tensorboard_events as events

        records = [events.version_record()] if self._is_new else []
        if self._starts_after is not None:
            records.append(events.start_record(self._starts_after))
        self._is_new, self._starts_after = False, None
        records += [events.value_record(step, name, value) for name, value in values.items()]
        self._file.append(b"".join(records))

    def rewind(self, last_step: int) -> None:
        """Make TensorBoard discard the events of steps after `last_step`."""
        self._starts_after = last_step

    def close(self) -> None:
        """Write pending records and close the file."""
        self._file.close()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from tensorboardX, which imports it where it is installed; events need none of it.

    The import takes seconds, and may bring CUDA libraries of other versions into the process.
    """
    hides = "torch" not in sys.modules
    if hides:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        if hides:
            del sys.modules["torch"]
