"""Devices by name: the numbers of their data sheets."""

from typing import NamedTuple


class Device(NamedTuple):
    """Dense bfloat16 FLOP/s without sparsity, and bytes of memory."""

    flops: float
    memory: int


_GB = 10**9
DEVICES: dict[str, Device] = {
    "B200": Device(2250e12, 180 * _GB),
    "H200": Device(989e12, 141 * _GB),
    "H100": Device(989e12, 80 * _GB),
    "A100": Device(312e12, 80 * _GB),
    "L40S": Device(362e12, 48 * _GB),
    "RTX 4090": Device(165e12, 24 * _GB),
}
