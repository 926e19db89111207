"""The collectives of tensor parallelism, with explicit gradients.

Everything runs inside a `shard_map` with `check_vma=False`, where the transpose of a plain `psum`
is a `psum`, which gives wrong gradients; so Megatron's pair of operators has gradient rules of its
own. The all-gather and the reduce-scatter of sequence parallelism are each other's transpose and
need none.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.core.mesh.mesh import PP, TP

_SEQUENCE = 1  # the axis of L in [B, L, ...]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_devices(x: jax.Array, axis: str) -> jax.Array:
    """Return `x`; the gradient is all-reduced over the axis (Shoeybi et al. 2019, f)."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_over_devices(x: Tree, axis: str) -> Tree:
    """All-reduce `x`; the gradient passes unchanged to every device (Shoeybi et al. 2019, g)."""
    return lax.psum(x, axis)


copy_to_devices.defvjp(lambda x, axis: (x, None), lambda axis, _, dy: (lax.psum(dy, axis),))
sum_over_devices.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, dy: (dy,))


@dataclass(frozen=True)
class TensorParallel(OneDevice):
    """`size` devices along the mesh axis tp that share every layer.

    With `sequence`, the stream between sublayers is sharded along the sequence, `[B, L / size, D]`
    on each device: all-gathered on entering and reduce-scattered on leaving (Korthikanti et al.
    2022, section 4.2.2). As many bytes are sent within a layer; stored activations and messages
    between pipeline ranks shrink by a factor of `size`.
    """

    def index(self) -> jax.Array:
        """This device's coordinate on tp."""
        return lax.axis_index(TP)

    def enter(self, x: jax.Array) -> jax.Array:
        """The full stream, `[B, L, D]`."""
        if self.sequence:
            return lax.all_gather(x, TP, axis=_SEQUENCE, tiled=True)
        return copy_to_devices(x, TP)

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of `[B, L, D]` over the devices; with `sequence` this device's tokens of it."""
        if self.sequence:
            return lax.psum_scatter(x, TP, scatter_dimension=_SEQUENCE, tiled=True)
        return sum_over_devices(x, TP)

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """This device's tokens of `[B, L, ...]`; all tokens without `sequence`."""
        if not self.sequence:
            return x
        own = x.shape[_SEQUENCE] // self.size
        return lax.dynamic_slice_in_dim(x, self.index() * own, own, _SEQUENCE)

    def total(self, x: Tree) -> Tree:
        """The sum over the devices."""
        return sum_over_devices(x, TP)

    def joint_sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices; the gradient is the sum of those of all devices, too."""
        return copy_to_devices(sum_over_devices(x, TP), TP)

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum over the devices, without a gradient."""
        return lax.pmax(lax.stop_gradient(x), TP)


@dataclass(frozen=True)
class VocabularyParallel(OneDevice):
    """All devices of a replica, which share the vocabulary: one tp group on each pipeline rank.

    The vocabulary is sharded over tp, and each of these shards over pp.

    Attributes:
      group: the operators of one pipeline rank's tp group.
      ranks: number of pipeline ranks.
    """

    group: OneDevice = ONE_DEVICE
    ranks: int = 1

    @classmethod
    def of(cls, group: OneDevice, ranks: int) -> "VocabularyParallel":
        """The devices of `ranks` groups, one per pipeline rank."""
        return cls(group.size * ranks, group.sequence, group, ranks)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a group, then pp."""
        return (*self.group.axes, PP)

    def index(self) -> jax.Array:
        """Index of this device's shard of the vocabulary."""
        return self.group.index() * self.ranks + lax.axis_index(PP)

    def enter(self, x: jax.Array) -> jax.Array:
        """The full stream, from a copy on every pipeline rank."""
        return self.group.enter(copy_to_devices(x, PP))

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of `[B, L, D]` over all devices; with `sequence` this device's tokens."""
        return sum_over_devices(self.group.leave(x), PP)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the devices."""
        return sum_over_devices(self.group.total(x), PP)

    def joint_sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices; the gradient is the sum of those of all devices, too."""
        return copy_to_devices(sum_over_devices(self.group.joint_sum(x), PP), PP)

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum over the devices, without a gradient."""
        return lax.pmax(self.group.largest(x), PP)
