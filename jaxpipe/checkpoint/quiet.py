"""Orbax's threads print what they raise as well; whoever waits for them reports it once."""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """In the body nothing is printed of why Orbax's threads failed, which they raise as well.

    Orbax logs it in every thread. Once one array has failed it no longer waits for the others and
    closes their event loop: asyncio logs their errors when their tasks are collected as garbage,
    and TensorStore prints that it finds the loop closed.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        from_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
        return record.levelno < logging.ERROR or not from_orbax

    def unraisable(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    before, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]
    sys.unraisablehook = unraisable
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        gc.collect()  # while the filters are there
        for logger in loggers:
            logger.removeFilter(is_kept)
        sys.unraisablehook = before
