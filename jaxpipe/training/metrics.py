"""How fast and how well: peaks of devices, and the log that a run leaves."""

import json
import math
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from jaxpipe.runtime.devices import DEVICES


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by jax's name for it; None where unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    return next((device.flops for name, device in DEVICES.items() if name in device_kind), None)


def memory_peak() -> int | None:
    """Most bytes in use so far on any device of this process; None where jax does not know."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)


class MetricsLog:
    """`<directory>/metrics.jsonl`, one object a step, and TensorBoard event files beside it.

    A run resumed after `last_step` first drops what was logged past it, so every step stands once.
    Numbers that JSON cannot write (NaN, infinity) are null. A context manager.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, last_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        _keep_until(path, last_step)
        self._file = path.open("a", buffering=1)
        self._writer = None
        if tensorboard:
            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=last_step + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._writer:
            self._writer.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one step's values."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | finite) + "\n")
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def _keep_until(path: Path, last_step: int) -> None:
    """Rewrite a log without the steps after `last_step` and without a half-written line."""
    if not path.exists():
        return

    def step_of(line: str) -> Any:
        try:
            return json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError):
            return math.inf

    kept = [line for line in path.read_text().splitlines() if step_of(line) <= last_step]
    fresh = path.with_suffix(".jsonl.new")
    fresh.write_text("".join(f"{line}\n" for line in kept))
    fresh.replace(path)
