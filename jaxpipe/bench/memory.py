"""Memory of this process while something runs, by Linux's own count. Imports nothing but Python."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROCESS = Path("/proc/self")


def peak(run: Callable[[], Any]) -> dict[str, int]:
    """Bytes of memory (RSS): `peak` while it runs, `before` it, freed blocks given back first."""
    give_back()
    (_PROCESS / "clear_refs").write_text("5")  # the peak counts from here
    before = _bytes("VmRSS")
    run()
    return {"before": before, "peak": _bytes("VmHWM")}


def give_back() -> None:
    """Give freed blocks back to the system, where the C library can."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _bytes(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found.split()[1])
