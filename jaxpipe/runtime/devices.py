"""Devices by name: the numbers of their data sheets, and what is known of those that are here."""

import os
from typing import NamedTuple

from jaxpipe.config import ConfigError, first_line


class Device(NamedTuple):
    """Dense bfloat16 FLOP/s without sparsity, bytes of memory, and FLOP/s of 8-bit floats.

    `fp8` is 0 where it has no products of them.
    """

    flops: float
    memory: int
    fp8: float = 0


_GB = 10**9
DEVICES: dict[str, Device] = {
    "B200": Device(2250e12, 180 * _GB, 4500e12),
    "H200": Device(989e12, 141 * _GB, 1979e12),
    "H100": Device(989e12, 80 * _GB, 1979e12),
    "A100": Device(312e12, 80 * _GB),
    "L40S": Device(362e12, 48 * _GB, 733e12),
    "RTX 4090": Device(165e12, 24 * _GB, 330e12),
}


def check_devices() -> None:
    """Raise `ConfigError` where jax cannot use a device of the kind that it is told to use.

    That takes the device: call it once what is set before jax starts is set.
    """
    import jax

    try:
        jax.devices()
    except jax.errors.JaxRuntimeError:
        raise  # of another process
    except (AssertionError, RuntimeError) as error:  # no other says which platform has no device
        wanted = jax.config.jax_platforms or "any platform"
        reason = f" ({first_line(error)})" if str(error) else ""
        raise ConfigError(
            f"jax finds no device of {wanted}{reason}: install the driver and jaxpipe[cuda13], "
            f"change JAX_PLATFORMS, or set runtime.cpu_devices to run on CPU."
        ) from error


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by jax's name for it; None where unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    return next((device.flops for name, device in DEVICES.items() if name in device_kind), None)


def device_memory(device_kind: str) -> int | None:
    """Bytes of a device's memory by jax's name for it; None where unknown.

    >>> device_memory("NVIDIA H100 80GB HBM3"), device_memory("cpu")
    (80000000000, None)
    """
    return next((device.memory for name, device in DEVICES.items() if name in device_kind), None)


def host_memory() -> int:
    """Bytes of this machine's memory, which virtual CPU devices share."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compute_capability() -> float | None:
    """That of the GPUs of this process, 9.0 of an H100; None where they have none."""
    import jax

    found = getattr(jax.local_devices()[0], "compute_capability", None)
    return None if found is None else float(found)


def memory_peak() -> int | None:
    """Most bytes in use so far on any device of this process; None where jax does not know."""
    import jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)
