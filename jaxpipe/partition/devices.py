"""Tensor parallelism as a model sees it: how parameters are cut, and what devices do together.

A layer's devices hold equal parts of its matrices (Shoeybi et al. 2019, section 3). A model names
the part of each parameter by a `Leaf`, and calls `enter` where values go into matrices cut along
their outputs, `leave` where they come out of matrices cut along their inputs. This module has the
case of a single device; `jaxpipe.parallel.TensorParallel` is the other.
"""

from dataclasses import dataclass
from typing import Any

from jaxpipe.partition.leaf import TP


@dataclass(frozen=True)
class OneDevice:
    """A layer that no other device shares: everything is whole, nothing needs to be sent."""

    size: int = 1
    sequence: bool = False  # is the stream between sublayers cut along the sequence?

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which the devices stand, largest parts first."""
        return (TP,)

    def index(self) -> Any:
        """This device's place among those that share the layer."""
        return 0

    def enter(self, x: Any) -> Any:
        """The stream as matrices cut along their outputs take it: whole."""
        return x

    def leave(self, x: Any) -> Any:
        """What matrices cut along their inputs make, added up over the devices."""
        return x

    def total(self, x: Any) -> Any:
        """The sum of the devices' values, which each of them goes on to use alike."""
        return x

    def largest(self, x: Any) -> Any:
        """The elementwise maximum of the devices' values, without a gradient."""
        return x


ONE_DEVICE = OneDevice()
