"""The collectives of context parallelism, and the sharding of a batch over replicas."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.core.mesh.groups import strided_groups
from jaxpipe.core.mesh.mesh import ZERO_AXES


@dataclass(frozen=True)
class ContextParallel(FullSequence):
    """`size` replicas that share every sequence; two neighbours are `stride` replicas apart.

    They are on the mesh axes dp and ep like any other replicas: parameters and gradients see only
    replicas, and the experts may be sharded over the same devices. Each device has one sequence
    shard, in the order of devices. In a ring this holds within each group that exchanges heads, and
    the ring is zigzag-sharded: a group has two chunks of the sequence, one from each half, so that
    causal attention is equal work for all groups. The gradient of a gathered array is
    reduce-scattered, which is the transpose of the all-gather.
    """

    stride: int = 1

    def index(self) -> jax.Array:
        """This device's index among those that share its sequences."""
        return lax.axis_index(ZERO_AXES) // self.stride % self.size

    @property
    def after_exchange(self) -> FullSequence:
        """The ring of groups, each of which acts as one device; without a ring a single device."""
        if self.heads < 2:
            return self
        if self.ring == 1:
            return FullSequence(heads=1)
        return ContextParallel(self.ring, heads=1, stride=self.heads)

    def start(self, own: int) -> jax.Array:
        """Index of this device's first token, of `own`, among those of its group."""
        return self.index() % self._group * own

    def positions(self, own: int) -> jax.Array:
        """Positions in the sequence of this device's `own` tokens, `[own]`."""
        token_L = self.start(own) + jnp.arange(own)
        if self.ring == 1:
            return token_L
        half, group = self._group * own // 2, self.index() // self._group
        early_L, late_L = group * half + token_L, (2 * self.ring - 2 - group) * half + token_L
        return jnp.where(token_L < half, early_L, late_L)

    def gather(self, x: jax.Array) -> jax.Array:
        """`[B, L, ...]` of all tokens, from `[B, L / size, ...]`, in the order of devices."""
        return lax.all_gather(x, ZERO_AXES, axis=1, tiled=True, axis_index_groups=self._sharers)

    def rotate(self, tree: Any) -> Any:
        """The values of the previous device in the ring; call it on `after_exchange`.

        This is a permute, except on CPU: pipeline ranks are in different branches, and XLA:CPU's
        permutes, which know no groups, would take values of other ranks. There it is an all-gather
        from which one block is taken.
        """
        if self.ring == 1:
            return tree

        def rotate(x: jax.Array) -> jax.Array:
            return lax.platform_dependent(
                x, cpu=self._rotate_by_gather, default=self._rotate_by_permute
            )

        return jax.tree.map(rotate, tree)

    def _rotate_by_permute(self, x: jax.Array) -> jax.Array:
        pairs = [(ring[i - 1], ring[i]) for ring in self._sharers for i in range(self.size)]
        return lax.ppermute(x, ZERO_AXES, pairs)

    def _rotate_by_gather(self, x: jax.Array) -> jax.Array:
        every = lax.all_gather(x, ZERO_AXES, axis_index_groups=self._sharers)
        return lax.dynamic_index_in_dim(every, (self.index() - 1) % self.size, keepdims=False)

    def gather_group(self, x: jax.Array) -> jax.Array:
        """`[B, L, ...]` of the tokens of all neighbours that exchange heads with this device."""
        if self.heads < 2:
            return x
        return lax.all_gather(x, ZERO_AXES, axis=1, tiled=True, axis_index_groups=self._neighbours)

    def to_heads(self, x_BLHK: jax.Array) -> jax.Array:
        """The group's tokens for a share of the heads, from this device's `[B, L, H, K]`.

        With fewer heads than neighbours several devices get the same head.
        """
        if self.heads < 2:
            return x_BLHK
        if copies := self.heads // x_BLHK.shape[2]:
            x_BLHK = jnp.repeat(x_BLHK, copies, axis=2)
        return self._exchange(x_BLHK, apart=2, together=1)

    def to_tokens(self, x_BSHK: jax.Array) -> jax.Array:
        """This device's tokens for all heads, from the group's tokens for a share of them."""
        if self.heads < 2:
            return x_BSHK
        return self._exchange(x_BSHK, apart=1, together=2)

    def _exchange(self, x: jax.Array, *, apart: int, together: int) -> jax.Array:
        groups = self._neighbours
        return lax.all_to_all(x, ZERO_AXES, apart, together, tiled=True, axis_index_groups=groups)

    @property
    def _group(self) -> int:
        """Number of neighbours with consecutive tokens: a group of the ring, or all devices."""
        return self.size // self.ring

    @property
    def _sharers(self) -> list[list[int]]:
        """The groups of replicas that share a sequence."""
        return strided_groups(lax.axis_size(ZERO_AXES), self.size, self.stride)

    @property
    def _neighbours(self) -> list[list[int]]:
        """The groups of replicas that exchange heads."""
        return strided_groups(lax.axis_size(ZERO_AXES), self.heads, self.stride)

    def shard(self, values: Any, dp: int) -> Any:
        """`[M, B, L, ...]` as `[M, B * size, L / size, ...]`, whose axis 1 dp then shards.

        >>> import numpy as np
        >>> ContextParallel(2).shard(np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]]), dp=2).tolist()
        [[[1, 2], [5, 6], [3, 4], [7, 8]]]
        >>> ContextParallel(2, heads=1).shard(np.array([[[1, 2, 3, 4]]]), dp=2).tolist()
        [[[1, 4], [2, 3]]]
        >>> ContextParallel(4, heads=2).shard(np.array([[[1, 2, 3, 4]]]), dp=4).tolist()
        [[[1], [4], [2], [3]]]
        """
        m, b, length, *rest = values.shape
        groups, own = dp // self.size, length // self.size
        if self.ring > 1:
            halves = values.reshape(m, b, 2 * self.ring, length // (2 * self.ring), *rest)
            order = [half for i in range(self.ring) for half in (i, 2 * self.ring - 1 - i)]
            values = halves[:, :, np.array(order)]
        parts = values.reshape(m, groups, b // groups, self.size, own, *rest)
        return parts.swapaxes(2, 3).reshape(m, b * self.size, own, *rest)


def shard_batch(
    batch: dict[str, Any], *, slices: int, cp: int, dp: int, heads: int = 0
) -> dict[str, Any]:
    """Shard a batch along the sequence, over sequence slices and context-parallel replicas.

    Args:
      batch: arrays `[M, B, L, ...]` by name.
      slices: sequence slices, each of which is a microbatch of the pipeline.
      cp: replicas that share each sequence.
      dp: all replicas.
      heads: neighbours that exchange heads (`FullSequence.heads`).

    Returns:
      Arrays `[M * slices, B * cp, L / (slices * cp), ...]`; with several slices also `slice`,
      int32, the index of the sequence slice of every row.

    >>> import numpy as np
    >>> tokens = np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    >>> batch = shard_batch({"inputs": tokens}, slices=2, cp=1, dp=1)
    >>> batch["inputs"].tolist(), batch["slice"].tolist()
    ([[[1, 2], [5, 6]], [[3, 4], [7, 8]]], [[0, 0], [1, 1]])
    """
    replicas = ContextParallel(cp, heads)

    def distribute(values: Any) -> Any:
        m, b, length, *rest = values.shape
        parts = values.reshape(m, b, slices, length // slices, *rest).swapaxes(1, 2)
        return replicas.shard(parts.reshape(m * slices, b, length // slices, *rest), dp)

    leaves = {name: distribute(values) for name, values in batch.items()}
    if slices == 1:
        return leaves
    rows, examples = next(iter(leaves.values())).shape[:2]
    which = np.arange(rows, dtype=np.int32)[:, None] % slices
    return leaves | {"slice": np.broadcast_to(which, (rows, examples))}
