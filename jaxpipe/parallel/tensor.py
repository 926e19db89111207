"""What the devices of a tensor-parallel group do together, with gradients that are right.

Everything runs inside a `shard_map` with `check_vma=False`, where a plain `psum` has a psum for its
transpose and gives wrong gradients; so the pair of Megatron's operators is spelled out. The gather
and the scatter of sequence parallelism are each other's transpose as they are.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax import lax

from jaxpipe.parallel.mesh import PP, TP
from jaxpipe.partition.devices import ONE_DEVICE, OneDevice

_SEQUENCE = 1  # the axis of L in [B, L, ...]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_devices(x: jax.Array, axis: str) -> jax.Array:
    """`x` on every device; its gradient is the sum of theirs (Shoeybi et al. 2019, f)."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_devices(x: jax.Array, axis: str) -> jax.Array:
    """The sum of the devices' `x`; each has the gradient of the sum (Shoeybi et al. 2019, g)."""
    return lax.psum(x, axis)


copy_to_devices.defvjp(lambda x, axis: (x, None), lambda axis, _, dy: (lax.psum(dy, axis),))
sum_of_devices.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, dy: (dy,))


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
        return copy_to_devices(x, TP)

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' `[B, L, D]`: all of it, or this device's tokens."""
        if self.sequence:
            return lax.psum_scatter(x, TP, scatter_dimension=_SEQUENCE, tiled=True)
        return sum_of_devices(x, TP)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' values."""
        return sum_of_devices(x, TP)

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum of the devices' values, without a gradient."""
        return lax.pmax(lax.stop_gradient(x), TP)


@dataclass(frozen=True)
class VocabularyParallel(OneDevice):
    """All devices of a model's replica, which share its vocabulary: `ranks` along pp, each a group.

    `group` is what one rank's devices do together in a layer. A device has the part of the
    vocabulary that its place along tp, then its rank along pp give it.
    """

    group: OneDevice = ONE_DEVICE
    ranks: int = 1

    @classmethod
    def of(cls, group: OneDevice, ranks: int) -> "VocabularyParallel":
        """`ranks` groups of devices."""
        return cls(group.size * ranks, group.sequence, group, ranks)

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of a group, then pp."""
        return (*self.group.axes, PP)

    def index(self) -> jax.Array:
        """This device's place."""
        return self.group.index() * self.ranks + lax.axis_index(PP)

    def enter(self, x: jax.Array) -> jax.Array:
        """The whole stream, of which all ranks have a copy."""
        return self.group.enter(copy_to_devices(x, PP))

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of all devices' `[B, L, D]`; with sequence parallelism this device's tokens."""
        return sum_of_devices(self.group.leave(x), PP)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' values."""
        return sum_of_devices(self.group.total(x), PP)

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum of the devices' values, without a gradient."""
        return lax.pmax(self.group.largest(x), PP)
