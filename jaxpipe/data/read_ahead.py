"""Batches read a few steps ahead, so that a run whose data fail can agree on where to stop."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxpipe.config import ConfigError

# When a process reads that all shall stop, others may be two programs ahead of it, and all stop
# after the next (`Watch.reached`). A process without batches for these could not take part.
PROGRAMS = 4


class ReadAhead:
    """An iterator over batches that keeps the next ones in memory.

    Args:
      batches: an iterator with `close()`.
      kept: number of batches after the next that are kept.

    Attributes:
      kept: may be changed.
      error: why no further batch could be read; it is raised after the batches before it.
    """

    def __init__(self, batches: Any, kept: int = PROGRAMS):
        self.error: ConfigError | OSError | None = None
        self._batches, self.kept = batches, kept
        self._read: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self.error and len(self._read) <= self.kept:
            try:
                self._read.append(next(self._batches))
            except (ConfigError, OSError) as error:
                self.error = error
        if not self._read:
            assert self.error is not None
            raise self.error
        return self._read.popleft()

    def close(self) -> None:
        """Close the iterator."""
        self._batches.close()

    def failure(self, needed: int) -> ConfigError | OSError | None:
        """The error, if fewer batches than needed are left."""
        return self.error if len(self._read) < needed else None


def failure_of(batches: Any, needed: int) -> ConfigError | OSError | None:
    """What keeps an iterator from giving the batches that are needed; None if that is not known."""
    return batches.failure(needed) if isinstance(batches, ReadAhead) else None
