"""Seconds of kernels on one device, by its data sheet and a table of measured rates.

A table (`card_table.py`) has the TFLOP/s of matrix products and attentions of some sizes, and the
seconds of copies. Laws go through its entries by least squares, so that sizes between and beyond
them have a rate:

- a product of K bytes of each row reaches `limit / (1 + half / K)` of the peak, since every tile of
  the result begins and ends without products; of that, the share of the last wave of tiles that has
  work. Reading operands and writing the result overlaps with this, though not perfectly.
- attention over L keys with heads of D values reaches `1 / (a + b / L + c / D)` of the peak.
- other kernels take `launch + bytes / bandwidth`.

Devices without a table of their own reach the shares of an H100.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, hypot, sqrt

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.planning.cost.card_table import CardTable, read_table
from jaxpipe.planning.cost.kernels import Attention, Operations, Product
from jaxpipe.runtime.devices import DEVICES, Device

_TILE = 128  # rows and columns of a result that one core computes at once
_COPIED = 0.7  # of a product's seconds: with more in its copies, it says little about its rate


@dataclass(frozen=True)
class Rates:
    """The laws through a table's entries.

    Attributes:
      limits: share of the peak that products of long rows reach, by itemsize.
      half: bytes of a row at which products reach half of that.
      attention: a of a forward pass, a of a gradient, b and c.
      launch: seconds from the end of a kernel to the start of the next.
      bandwidth: share of the data sheet's that copies reach.
      sustained: clock under load, relative to the short runs of which the table is.
    """

    limits: dict[int, float]
    half: float
    attention: tuple[float, ...]
    launch: float
    bandwidth: float
    sustained: float

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


@dataclass(frozen=True)
class Card:
    """A device with its data sheet and the laws of its rates."""

    device: str
    sheet: Device
    rates: Rates

    def seconds(self, kernels: Operations) -> float:
        """Seconds of kernels, one after the other.

        Raises `ConfigError` if the device does not multiply 8-bit floats, and some products have
        them.
        """
        rates = self.rates
        seconds = self.copying(kernels.moved) + kernels.launches * rates.launch
        for product, times in kernels.products.items():
            rate = self._peak(product.itemsize) * rates.product(product, self.sheet.cores)
            computed = product.flops / rate / rates.sustained
            seconds += times * hypot(computed, self.copying(product.bytes))
        for attention, times in kernels.attentions.items():
            rate = self.sheet.flops * rates.attended(attention) * rates.sustained
            seconds += times * attention.flops / rate
        return seconds

    def copying(self, size: float) -> float:
        """Seconds in which the device reads and writes `size` bytes of its memory in all."""
        return size / (self.sheet.bandwidth * self.rates.bandwidth)

    def _peak(self, itemsize: int) -> float:
        """Dense FLOP/s of products of operands of this size; those of float32 run as TF32."""
        if itemsize != 1:
            return self.sheet.flops / (2 if itemsize == 4 else 1)
        if not self.sheet.fp8:
            able = ", ".join(name for name, one in DEVICES.items() if one.fp8)
            raise ConfigError(
                f"train.fp8 with the device {self.device!r}, which does not multiply 8-bit floats: "
                f"use one of {able}, or set train.fp8=none."
            )
        return self.sheet.fp8


@lru_cache
def card_of(device: str, table: str = "") -> Card:
    """The card of a name, with the rates of the table in a file; "": the shares of an H100.

    Raises `ConfigError` as `read_table` does, and if the table has too few entries for the laws.
    """
    content = read_table(table)
    if not table:
        return Card(device, DEVICES[device], _fit(content))
    try:
        return fitted(content)
    except ConfigError as error:
        raise ConfigError(f"{table}: {error}") from error


def fitted(table: CardTable) -> Card:
    """The card of a table; raises `ConfigError` if it has too few entries for the laws."""
    sheet = table.sheet or DEVICES[table.device]
    return Card(table.device, sheet, _fit(table))


def deviations(table: CardTable) -> dict[str, list[float]]:
    """The seconds that the laws say over those measured, of every entry by the kind of entries."""
    card = fitted(table)
    short = replace(card, rates=replace(card.rates, sustained=1.0))
    peak = card.sheet.flops / 1e12
    return {
        "products": [
            short.seconds(Operations({one.product: 1})) / one.seconds for one in table.products
        ],
        "attention": [
            one.tflops / peak / card.rates.attended(Attention(one.keys, one.width, 1, one.gradient))
            for one in table.attention
        ],
        "copies": [
            card.seconds(Operations(moved=one.bytes, launches=1)) / one.seconds
            for one in table.copies
        ],
    }


def _busy(one: Product, cores: int) -> float:
    """Share of all cores' time that goes into results, not into edges or idle in the last wave.

    A CPU, which has one core, multiplies without tiles of this size.
    """
    if cores == 1:
        return 1.0
    tiles = one.groups * ceil(one.rows / _TILE) * ceil(one.columns / _TILE)
    waves = tiles / cores
    return one.groups * one.rows * one.columns / (tiles * _TILE**2) * waves / ceil(waves)


def _fit(table: CardTable) -> Rates:
    """The laws through the entries of a table."""
    sheet = table.sheet or DEVICES[table.device]
    launch, slowness = _least_squares(
        "copies", [(1, one.bytes) for one in table.copies], [one.seconds for one in table.copies]
    )
    if not slowness:
        raise ConfigError("its copies take equally long whatever their size: measure them anew.")
    rows = [
        (not one.gradient, one.gradient, 1 / one.keys, 1 / one.width) for one in table.attention
    ]
    inverses = [sheet.flops / 1e12 / one.tflops for one in table.attention]
    rates = Rates(
        limits={}, half=0.0, attention=_least_squares("attention", rows, inverses), launch=launch,
        bandwidth=1 / slowness / sheet.bandwidth, sustained=table.sustained.share,
    )  # fmt: skip
    limits, half = _fit_products(table, Card(table.device, sheet, rates))
    return replace(rates, limits=limits, half=half)


def _fit_products(table: CardTable, card: Card) -> tuple[dict[int, float], float]:
    """The shares of products of long rows, and the bytes at which products reach half of them."""
    found: dict[int, list[tuple[float, float]]] = {}  # bytes of a row, and 1 / share of the peak
    for entry in table.products:
        one, copied = entry.product, card.copying(entry.product.bytes)
        if copied > _COPIED * entry.seconds:
            continue
        if entry.itemsize == 1 and not card.sheet.fp8:
            raise ConfigError(
                f"products of 8-bit floats (itemsize 1), which {card.device} does not multiply."
            )
        computed = sqrt(entry.seconds**2 - copied**2)
        share = one.flops / card._peak(one.itemsize) / computed
        inverse = _busy(one, card.sheet.cores) / share
        found.setdefault(one.itemsize, []).append((one.inner * one.itemsize, inverse))
    most = max(found.values(), key=len, default=[])
    inverses = [inverse for _, inverse in most]
    constant, slope = _least_squares("products", [(1, 1 / size) for size, _ in most], inverses)
    if not constant:
        raise ConfigError("its products get faster with every byte of a row: measure longer rows.")
    half = slope / constant
    return {
        itemsize: float(np.mean([(1 + half / size) / inverse for size, inverse in entries]))
        for itemsize, entries in found.items()
    }, half


def _least_squares(
    name: str, rows: Sequence[tuple[float, ...]], values: Sequence[float]
) -> tuple[float, ...]:
    """The coefficients of the columns by which rows come closest to values, relative to these.

    None is below 0: a column whose coefficient would be is left out. Raises `ConfigError` if
    entries by this name do not determine all.
    """
    columns = len(rows[0]) if rows else 1
    matrix = np.asarray(rows, float).reshape(-1, columns) / np.asarray(values, float)[:, None]
    scale = matrix.max(0, initial=0)
    if np.linalg.matrix_rank(matrix / np.where(scale, scale, 1)) < columns:
        raise ConfigError(
            f"too few different entries in {name!r} for the law through them: it has {len(rows)}."
        )
    found, used = np.zeros(columns), np.ones(columns, bool)
    while True:
        found[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            return tuple(map(float, found))
        used &= found > 0
        found[:] = 0
