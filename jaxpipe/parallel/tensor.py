"""What the devices of a tensor-parallel group do together, with gradients that are right.

Everything runs inside a `shard_map` with `check_vma=False`, where a plain `psum` has a psum for its
transpose and gives wrong gradients; so the pair of Megatron's operators is spelled out. The gather
and the scatter of sequence parallelism are each other's transpose as they are.
"""

from dataclasses import dataclass

import jax
from jax import lax

from jaxpipe.parallel.mesh import TP
from jaxpipe.tensor import OneDevice

_SEQUENCE = 1  # the axis of L in [B, L, ...]


@jax.custom_vjp
def copy_to_devices(x: jax.Array) -> jax.Array:
    """`x` on every device; its gradient is the sum of theirs (Shoeybi et al. 2019, f)."""
    return x


@jax.custom_vjp
def sum_of_devices(x: jax.Array) -> jax.Array:
    """The sum of the devices' `x`; each has the gradient of the sum (Shoeybi et al. 2019, g)."""
    return lax.psum(x, TP)


copy_to_devices.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, TP),))
sum_of_devices.defvjp(lambda x: (lax.psum(x, TP), None), lambda _, dy: (dy,))


@dataclass(frozen=True)
class TensorParallel(OneDevice):
    """`size` devices along the mesh's tp axis that share every layer.

    With `sequence`, the stream between sublayers, `[B, L / size, D]` on each device, is cut along
    the sequence: gathered on entering, summed and scattered on leaving (Korthikanti et al. 2022,
    section 4.2.2). The bytes sent are the same, the bytes stored and passed on a `size`-th.
    """

    def index(self) -> jax.Array:
        """The coordinate on tp."""
        return lax.axis_index(TP)

    def enter(self, x: jax.Array) -> jax.Array:
        """The whole stream: `[B, L, D]`."""
        if self.sequence:
            return lax.all_gather(x, TP, axis=_SEQUENCE, tiled=True)
        return copy_to_devices(x)

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' `[B, L, D]`: all of it, or this device's tokens."""
        if self.sequence:
            return lax.psum_scatter(x, TP, scatter_dimension=_SEQUENCE, tiled=True)
        return sum_of_devices(x)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' values."""
        return sum_of_devices(x)

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum of the devices' values, without a gradient."""
        return lax.pmax(lax.stop_gradient(x), TP)
