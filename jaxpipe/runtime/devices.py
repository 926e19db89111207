"""Data sheets of devices by name, and properties of the devices and memory of this machine."""

import logging
import os
import re

import msgspec

from jaxpipe.config import ConfigError, first_line


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures from a data sheet, above 0.

    Attributes:
      flops: dense bfloat16 FLOP/s, without sparsity.
      memory: bytes.
      link: bytes per second to another device of the host, one way: NVLink, or PCIe.
      bandwidth: bytes per second of the memory.
      cores: streaming multiprocessors; 1: a CPU.
      fp8: dense FLOP/s of 8-bit floats; 0: the device does not multiply them.
    """

    flops: float
    memory: int
    link: float
    bandwidth: float
    cores: int
    fp8: float = 0


_GB = 10**9
# Source: NVIDIA's data sheets of these cards; the memory of B200, H200, H100 and A100 is what CUDA
# has (`gpu/*.txtpb`). A name that begins like another one comes before it.
DEVICES: dict[str, Device] = {
    "GB200": Device(2500e12, 186 * _GB, 900e9, 8e12, 148, 5000e12),
    "B200": Device(2250e12, 191_514_411_008, 900e9, 8e12, 148, 4500e12),
    "GH200": Device(989e12, 96 * _GB, 450e9, 4e12, 132, 1979e12),
    "H200 NVL": Device(835e12, 141 * _GB, 64e9, 4.8e12, 132, 1671e12),
    "H200": Device(989e12, 151_397_597_184, 450e9, 4.8e12, 132, 1979e12),
    "H100 NVL": Device(835e12, 94 * _GB, 64e9, 3.9e12, 132, 1671e12),
    "H100 PCIe": Device(756e12, 80 * _GB, 64e9, 2e12, 114, 1513e12),
    "H100": Device(989e12, 84_942_979_072, 450e9, 3.35e12, 132, 1979e12),
    "A100": Device(312e12, 85_100_068_864, 300e9, 2.04e12, 108),
    "L40S": Device(362e12, 48 * _GB, 32e9, 864e9, 142, 733e12),
    "RTX 4090": Device(165e12, 24 * _GB, 32e9, 1008e9, 128, 330e12),
}


def check_devices() -> None:
    """Raise `ConfigError` if jax finds no device of the platform that it is configured to use.

    It initialises the device, so call it after everything that must be set before jax starts.
    """
    import jax

    logging.getLogger("jax._src.xla_bridge").addFilter(_shorten)
    try:
        jax.devices()
    except jax.errors.JaxRuntimeError:
        raise  # caused by another process, not by this machine's devices
    except (AssertionError, RuntimeError) as error:  # jax has no narrower error
        wanted = jax.config.values["jax_platforms"] or "any platform"
        reason = f" ({first_line(error)})" if str(error) else ""
        raise ConfigError(
            f"jax finds no device of {wanted}{reason}: install the driver and jaxpipe[cuda13], "
            f"change JAX_PLATFORMS, or set runtime.cpu_devices to run on CPU."
        ) from error


def _shorten(record: logging.LogRecord) -> bool:
    """Leave out the traceback of a plug-in's error, as of the one for GPUs where there is none."""
    if record.exc_info and (error := record.exc_info[1]):
        reason = first_line(error)
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason}", (), None
    return True


def data_sheet_of(device_kind: str) -> str | None:
    """Key in `DEVICES` of a device by jax's name for it; None if unknown."""
    return next((name for name in DEVICES if re.search(rf"\b{name}\b", device_kind)), None)


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by jax's name for it; None if unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    name = data_sheet_of(device_kind)
    return DEVICES[name].flops if name else None


def device_memory(device_kind: str) -> int | None:
    """Bytes of a device's memory by jax's name for it; None if unknown.

    >>> device_memory("NVIDIA H100 80GB HBM3"), device_memory("cpu")
    (84942979072, None)
    """
    name, stated = data_sheet_of(device_kind), re.search(r"(\d+)GB", device_kind)
    if name and stated:  # a smaller card, or the host's memory of a GH200
        return min(int(stated[1]) << 30, DEVICES[name].memory)
    return DEVICES[name].memory if name else None


def host_memory() -> int:
    """Bytes of this machine's memory, which virtual CPU devices share."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_peak() -> int | None:
    """Peak bytes in use on any device of this process so far; None if jax does not know."""
    import jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)
