"""Memory that was freed and is still counted as used."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_SMALLEST, _LARGEST = 64 * 2**10, 32 * 2**20  # bytes; glibc's own threshold ends at the latter


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """In the body what is freed goes back to the system, in blocks of 64 KiB and more.

    By default glibc keeps freed blocks of up to 32 MiB for later. Restoring reads many such blocks
    in many threads and needs each once, so those that are kept add up to as much as is restored.
    Does nothing under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _SMALLEST)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)
