"""Suppression of errors that Orbax's threads print and also raise; the caller reports them once."""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def suppress_orbax_errors() -> Iterator[None]:
    """Within the context, do not print errors of Orbax's threads; they are raised as well.

    Orbax logs an error in every thread. Once one array has failed, it stops waiting for the others
    and closes their event loop: asyncio then logs their errors when their tasks are garbage
    collected, and TensorStore prints that the loop is closed.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        from_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
        return record.levelno < logging.ERROR or not from_orbax

    def unraisable(error: Any) -> None:
        if str(error.exc_value) != "Event loop is closed":
            before(error)

    before, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]
    sys.unraisablehook = unraisable
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        gc.collect()  # asyncio logs on collection, so collect while the filters are installed
        for logger in loggers:
            logger.removeFilter(is_kept)
        sys.unraisablehook = before
