"""Floating-point operations of F, B and W, counted product by product.

A product of an `[m, k]` and a `[k, n]` matrix takes `2 m k n` operations; nothing else is counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OpFlops:
    """Operations of one microbatch on one device; an unsplit backward takes B + W.

    Instances add up: `sum(parts, OpFlops())`.

    >>> OpFlops.of_weight(10.0) + OpFlops.of_values(1.0)
    OpFlops(F=11.0, B=12.0, W=10.0)
    """

    F: float = 0.0
    B: float = 0.0
    W: float = 0.0

    @classmethod
    def of_weight(cls, product: float) -> "OpFlops":
        """Count a product of activations with a weight: B and W each take as much as F."""
        return cls(product, product, product)

    @classmethod
    def of_values(cls, product: float) -> "OpFlops":
        """Count a product of two activations: B computes both gradients, none is a weight's."""
        return cls(product, 2 * product, 0.0)

    @property
    def backward(self) -> float:
        """Operations of an unsplit backward."""
        return self.B + self.W

    def __add__(self, other: "OpFlops") -> "OpFlops":
        return OpFlops(self.F + other.F, self.B + other.B, self.W + other.W)
