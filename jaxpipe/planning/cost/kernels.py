"""What the kernels of a function are: products, attention, bytes that they move, launches."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Product(NamedTuple):
    """Matrix products of `groups` pairs: [rows, inner] with [inner, columns].

    `itemsize` is that of the operands, `bytes` those of operands and result.
    """

    itemsize: int
    groups: int
    rows: float
    inner: float
    columns: int
    bytes: int

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.groups * self.rows * self.inner * self.columns


class Attention(NamedTuple):
    """A fused attention, or its gradient, over `keys` keys with heads of `width` values."""

    keys: int
    width: int
    flops: float
    is_gradient: bool


@dataclass
class Operations:
    """The kernels of a function on one device.

    Attributes:
      products, attentions: how often each occurs.
      moved: bytes that other kernels read and write.
      launches: number of kernels.
    """

    products: dict[Product, float] = field(default_factory=dict)
    attentions: dict[Attention, float] = field(default_factory=dict)
    moved: float = 0.0
    launches: float = 0.0

    def flops(self, itemsize: int = 0) -> float:
        """FLOPs of products and attention; with `itemsize` those of such operands alone."""
        found = sum(
            each.flops * number
            for each, number in self.products.items()
            if itemsize in (0, each.itemsize)
        )
        if itemsize:
            return found
        return found + sum(each.flops * number for each, number in self.attentions.items())

    def add(self, more: "Operations", times: float = 1) -> None:
        """Add those of another function, which runs `times` times."""
        for product, number in more.products.items():
            self.products[product] = self.products.get(product, 0) + number * times
        for attention, number in more.attentions.items():
            self.attentions[attention] = self.attentions.get(attention, 0) + number * times
        self.moved += more.moved * times
        self.launches += more.launches * times
