"""Tensor parallelism as a model sees it: the operators that a layer calls.

The tp devices of a layer hold equal shards of its matrices (Shoeybi et al. 2019, section 3). A
model declares the shard of each parameter by a `ParamSpec`. It calls `enter` before column-parallel
matrices (sharded along their outputs) and `leave` after row-parallel ones (sharded along their
inputs). This module has the case of a single device; `jaxpipe.core.mesh.TensorParallel` is the case
of several.
"""

from dataclasses import dataclass
from typing import Any

from jaxpipe.core.contract.parameter import TP


@dataclass(frozen=True)
class OneDevice:
    """A layer on a single device: all arrays are full, and every operator is the identity.

    Attributes:
      size: number of devices that share the layer.
      sequence: whether the stream between sublayers is sharded along the sequence.
    """

    size: int = 1
    sequence: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the devices that share the layer, largest shards first."""
        return (TP,)

    def index(self) -> Any:
        """This device's index among those that share the layer."""
        return 0

    def enter(self, x: Any) -> Any:
        """The full stream, as input of column-parallel matrices (Megatron's f)."""
        return x

    def leave(self, x: Any) -> Any:
        """The output of row-parallel matrices, summed over the devices (Megatron's g)."""
        return x

    def own_tokens(self, x: Any) -> Any:
        """This device's tokens of `[B, L, ...]`: those of the stream between sublayers."""
        return x

    def total(self, x: Any) -> Any:
        """The sum over the devices, for values that all use alike afterwards."""
        return x

    def joint_sum(self, x: Any) -> Any:
        """The sum over the devices, for a value that each uses for its own shard afterwards."""
        return x

    def largest(self, x: Any) -> Any:
        """The elementwise maximum over the devices, without a gradient."""
        return x


ONE_DEVICE = OneDevice()
