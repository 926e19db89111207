"""Memory of this process during a call, as Linux counts it. Imports only the standard library."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROCESS = Path("/proc/self")


def measure_peak(run: Callable[[], Any]) -> dict[str, int]:
    """Return resident memory (RSS) in bytes, as `peak` during the call and as `before` it.

    Freed blocks are returned to the system first.
    """
    return_memory()
    (_PROCESS / "clear_refs").write_text("5")  # resets the peak, VmHWM
    before = _read_bytes("VmRSS")
    run()
    return {"before": before, "peak": _read_bytes("VmHWM")}


def return_memory() -> None:
    """Return freed blocks to the system if the C library has `malloc_trim`."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _read_bytes(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found.split()[1])
