"""Return of freed host memory to the operating system."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_SMALLEST, _LARGEST = 64 * 2**10, 32 * 2**20  # bytes; _LARGEST is the maximum of glibc's own


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Within the context, return freed blocks of at least 64 KiB to the system at once.

    By default glibc keeps freed blocks of up to 32 MiB for reuse. A restore reads many such blocks
    in many threads and needs each block once, so the kept blocks would add up to the size of the
    restored state. Under another C library this does nothing.
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
