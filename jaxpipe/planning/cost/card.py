"""Seconds of kernels on one device, by its data sheet and a table of measured rates.

A table has the TFLOP/s of matrix products and attentions of some sizes, each with its source. Two
laws go through its entries by least squares, so that sizes between and beyond them have a rate:

- a product of K bytes of each row reaches `limit / (1 + half / K)` of the peak, since every tile of
  the result begins and ends without products; of that, the share of the last wave of tiles that has
  work. Reading operands and writing the result overlaps with this, though not perfectly.
- attention over L keys with heads of D values reaches `1 / (a + b / L + c / D)` of the peak.

Other kernels move bytes at nine tenths of the memory's bandwidth, and every kernel has a launch.
Devices without a table of their own reach the shares of an H100.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil, hypot, sqrt

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.planning.cost.kernels import Attention, Operations, Product
from jaxpipe.runtime.devices import DEVICES

_TILE = 128  # rows and columns of a result that one core computes at once
_BANDWIDTH = 0.9  # share of the data sheet's that copies reach
_SUSTAINED = 0.84  # clock under load, relative to the short runs of which the table is
_LAUNCH = 2e-6  # seconds from the end of a kernel to the start of the next, within a CUDA graph


@dataclass(frozen=True)
class Rates:
    """The laws through a table's entries.

    Attributes:
      limits: share of the peak that products of long rows reach, by itemsize.
      half: bytes of a row at which products reach half of that.
      attention: a of a forward pass, a of a gradient, b and c.
    """

    limits: dict[int, float]
    half: float
    attention: tuple[float, float, float, float]

    def product(self, one: Product, cores: int) -> float:
        """Share of the peak of a product whose operands and result move in no time."""
        itemsize = one.itemsize if one.itemsize in self.limits else max(self.limits)
        size = one.inner * one.itemsize
        return self.limits[itemsize] * size / (size + self.half) * _busy(one, cores)

    def attended(self, one: Attention) -> float:
        """Share of the peak of an attention."""
        forward, gradient, keys, width = self.attention
        constant = gradient if one.is_gradient else forward
        return 1 / (constant + keys / one.keys + width / one.width)


def seconds_of(kernels: Operations, device: str) -> float:
    """Seconds of kernels on a device, one after the other.

    Raises `ConfigError` if the device does not multiply 8-bit floats, and some products have them.
    """
    sheet, rates = DEVICES[device], rates_of()
    bandwidth = sheet.bandwidth * _BANDWIDTH
    seconds = kernels.moved / bandwidth + kernels.launches * _LAUNCH
    for product, times in kernels.products.items():
        rate = _peak(device, product.itemsize) * rates.product(product, sheet.cores)
        seconds += times * hypot(product.flops / rate / _SUSTAINED, product.bytes / bandwidth)
    for attention, times in kernels.attentions.items():
        rate = sheet.flops * rates.attended(attention) * _SUSTAINED
        seconds += times * attention.flops / rate
    return seconds


def copy_seconds(size: float, device: str) -> float:
    """Seconds in which a device reads and writes `size` bytes of its memory in all."""
    return size / (DEVICES[device].bandwidth * _BANDWIDTH)


def _peak(device: str, itemsize: int) -> float:
    """Dense FLOP/s of products of operands of this size; those of float32 run as TF32."""
    sheet = DEVICES[device]
    if itemsize != 1:
        return sheet.flops / (2 if itemsize == 4 else 1)
    if not sheet.fp8:
        able = ", ".join(name for name, one in DEVICES.items() if one.fp8)
        raise ConfigError(
            f"train.fp8 with the device {device!r}, which does not multiply 8-bit floats: use one "
            f"of {able}, or set train.fp8=none."
        )
    return sheet.fp8


def _busy(one: Product, cores: int) -> float:
    """Share of all cores' time that goes into results, not into edges or idle in the last wave."""
    tiles = one.groups * ceil(one.rows / _TILE) * ceil(one.columns / _TILE)
    waves = tiles / cores
    return one.groups * one.rows * one.columns / (tiles * _TILE**2) * waves / ceil(waves)


@lru_cache
def rates_of() -> Rates:
    """The laws through the entries of the table of an H100."""
    content = json.loads(files(__package__).joinpath("h100.json").read_text("utf-8"))
    device = content["device"]
    found: dict[int, list[tuple[float, float]]] = {}  # bytes of a row, and 1 / share of the peak
    for entry in content["products"]:
        itemsize, groups, rows, inner, columns = (
            entry[name] for name in ("itemsize", "groups", "rows", "inner", "columns")
        )
        moved = groups * (itemsize * inner * (rows + columns) + 2 * rows * columns)
        one = Product(itemsize, groups, rows, inner, columns, moved)
        whole, copied = one.flops / (entry["tflops"] * 1e12), copy_seconds(moved, device)
        share = one.flops / _peak(device, itemsize) / sqrt(whole**2 - copied**2)
        inverse = _busy(one, DEVICES[device].cores) / share
        found.setdefault(itemsize, []).append((inner * itemsize, inverse))
    most = max(found.values(), key=len)
    constant, slope = _least_squares([(1, 1 / size) for size, _ in most], [y for _, y in most])
    half = slope / constant
    limits = {
        itemsize: float(np.mean([(1 + half / size) / inverse for size, inverse in entries]))
        for itemsize, entries in found.items()
    }
    rows = [
        (not one["gradient"], one["gradient"], 1 / one["keys"], 1 / one["width"])
        for one in content["attention"]
    ]
    inverses = [DEVICES[device].flops / 1e12 / one["tflops"] for one in content["attention"]]
    return Rates(limits, half, _least_squares(rows, inverses))


def _least_squares(rows: Sequence[tuple[float, ...]], values: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of the columns by which rows come closest to values, relative to these."""
    weights = 1 / np.asarray(values, float)
    matrix = np.asarray(rows, float) * weights[:, None]
    return tuple(map(float, np.linalg.lstsq(matrix, np.ones(len(weights)), rcond=None)[0]))
