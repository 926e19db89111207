"""The file of what a card was measured to reach: `h100.json`, or one of `bench ops --table`."""

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.planning.cost.kernels import Product
from jaxpipe.runtime.devices import DEVICES, Device

Itemsize = Literal[1, 2, 4]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Source = Annotated[str, msgspec.Meta(min_length=1)]


class MeasuredProduct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TFLOP/s of matrix products of `groups` pairs: [rows, inner] with [inner, columns].

    `itemsize` is that of the operands: 1 is an 8-bit float, 2 bfloat16, and 4 float32. Launches do
    not count. The source says where it was measured: date, versions and command, or a publication.
    """

    itemsize: Itemsize
    groups: _Count
    rows: _Count
    columns: _Count
    inner: _Count
    tflops: _Positive
    source: _Source

    @property
    def product(self) -> Product:
        """The products, whose result has 16 bits, or those of its operands if they are wider."""
        moved = self.itemsize * self.inner * (self.rows + self.columns)
        moved += max(2, self.itemsize) * self.rows * self.columns
        sizes = self.itemsize, self.groups, self.rows, self.inner, self.columns
        return Product(*sizes, bytes=self.groups * moved)

    @property
    def seconds(self) -> float:
        """Seconds that they took."""
        return self.product.flops / (self.tflops * 1e12)


class MeasuredAttention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TFLOP/s of causal attention over `keys` keys with heads of `width` values, or its gradient.

    FLOPs are half of those of all scores: a forward pass has two products of that size, and a
    gradient five.
    """

    keys: _Count
    width: _Count
    gradient: bool
    tflops: _Positive
    source: _Source


class MeasuredCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a kernel that reads and writes `bytes` bytes in all, with its launch."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    seconds: _Positive
    source: _Source


class SustainedShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rate under load, relative to the short runs of products and attention."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    source: _Source


class CardTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a card was measured to reach.

    Attributes:
      device: a name in `runtime.devices.DEVICES`, or of a card that is not there.
      sheet: the data sheet of such a card.
    """

    device: str
    products: tuple[MeasuredProduct, ...]
    attention: tuple[MeasuredAttention, ...]
    copies: tuple[MeasuredCopy, ...]
    sustained: SustainedShare
    sheet: Device | None = None


@lru_cache
def read_table(path: str = "") -> CardTable:
    """The table in a file; "": that of an H100.

    Raises `ConfigError` if it cannot be read, lacks a field, has one that is not known, or is of an
    unknown card and has no data sheet.
    """
    source = Path(path) if path else files(__package__).joinpath("h100.json")
    try:
        table = msgspec.json.decode(source.read_bytes(), type=CardTable)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{source} is no table of a card ({error}): write one on the card with "
            f"`python -m jaxpipe.bench ops --table --out FILE.json`."
        ) from error
    if table.sheet is None and table.device not in DEVICES:
        raise ConfigError(
            f"{source}: the device {table.device!r} is none of {', '.join(DEVICES)}, and the table "
            f"has no `sheet` of it."
        )
    return table
