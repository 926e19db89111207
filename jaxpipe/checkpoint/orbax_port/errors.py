"""Suppression of errors that Orbax's threads print and also raise; the caller reports them once."""

import functools
import logging
import sys
from typing import Any


@functools.cache
def suppress_orbax_errors() -> None:
    """From now on, do not print errors of Orbax's threads; they are raised as well.

    Orbax logs an error in every thread. Once one array has failed, it stops waiting for the others
    and closes their event loop: asyncio then logs their errors when their tasks are garbage
    collected, and TensorStore prints that the loop is closed. A write that still runs may fail as
    late as the end of the process, so nothing undoes it.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        from_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
        return record.levelno < logging.ERROR or not from_orbax

    def unraisable(error: Any) -> None:
        if str(error.exc_value) != "Event loop is closed":
            before(error)

    before = sys.unraisablehook
    sys.unraisablehook = unraisable
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_kept)
