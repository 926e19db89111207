"""What replicas that share sequences do together, and how a batch is cut and dealt to them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.parallel.mesh import SHARDS
from jaxpipe.partition.sequence import WholeSequence


@dataclass(frozen=True)
class ContextParallel(WholeSequence):
    """`size` of the replicas share every sequence, neighbours or so many `apart`.

    They are replicas like any others, along the mesh's axes dp and ep: parameters and gradients
    know of these alone, and they may have experts in parts too. Each has one stretch of the tokens,
    in their order. In a ring this is so within a group of those that exchange heads, and a group
    has two stretches of the sequence, one from its beginning and one from its end, so that causal
    attention is as much work for all. The gradient of what was gathered is summed and scattered,
    which is the transpose of the gather.
    """

    apart: int = 1

    def index(self) -> jax.Array:
        """This device's place among those that share its sequences."""
        return lax.axis_index(SHARDS) // self.apart % self.size

    @property
    def exchanged(self) -> WholeSequence:
        """The ring of groups, each of which is as one device; without one a device by itself."""
        if self.heads < 2:
            return self
        if self.ring == 1:
            return WholeSequence(heads=1)
        return ContextParallel(self.ring, heads=1, apart=self.heads)

    def start(self, own: int) -> jax.Array:
        """Where this device's first token stands, of `own`, among those of its group."""
        return self.index() % self._group * own

    def places(self, own: int) -> jax.Array:
        """Where in the sequence this device's `own` tokens stand, `[own]`."""
        token_L = self.start(own) + jnp.arange(own)
        if self.ring == 1:
            return token_L
        half, group = self._group * own // 2, self.index() // self._group
        early_L, late_L = group * half + token_L, (2 * self.ring - 2 - group) * half + token_L
        return jnp.where(token_L < half, early_L, late_L)

    def gather(self, x: jax.Array) -> jax.Array:
        """The `[B, L, ...]` of all tokens, from `[B, L / size, ...]`, in the order of devices."""
        return lax.all_gather(x, SHARDS, axis=1, tiled=True, axis_index_groups=self._sharers)

    def turned(self, tree: Any) -> Any:
        """What the device before this one has, in the ring of an `exchanged` sequence.

        A permute. Ranks of a pipeline are in different branches, where XLA's permutes on CPU, which
        know no groups, would take values of others: there it is a gather, of which one is taken.
        """
        if self.ring == 1:
            return tree

        def turned(x: jax.Array) -> jax.Array:
            return lax.platform_dependent(
                x, cpu=self._turned_by_gather, default=self._turned_by_permute
            )

        return jax.tree.map(turned, tree)

    def _turned_by_permute(self, x: jax.Array) -> jax.Array:
        pairs = [(ring[i - 1], ring[i]) for ring in self._sharers for i in range(self.size)]
        return lax.ppermute(x, SHARDS, pairs)

    def _turned_by_gather(self, x: jax.Array) -> jax.Array:
        every = lax.all_gather(x, SHARDS, axis_index_groups=self._sharers)
        return lax.dynamic_index_in_dim(every, (self.index() - 1) % self.size, keepdims=False)

    def together(self, x: jax.Array) -> jax.Array:
        """The `[B, L, ...]` of the tokens of neighbours that exchange heads."""
        if self.heads < 2:
            return x
        return lax.all_gather(x, SHARDS, axis=1, tiled=True, axis_index_groups=self._neighbours)

    def to_heads(self, x_BLHK: jax.Array) -> jax.Array:
        """The tokens of such neighbours for a share of the heads, from its own `[B, L, H, K]`.

        Where there are fewer heads than neighbours, several have the same one.
        """
        if self.heads < 2:
            return x_BLHK
        if copies := self.heads // x_BLHK.shape[2]:
            x_BLHK = jnp.repeat(x_BLHK, copies, axis=2)
        return self._exchanged(x_BLHK, apart=2, together=1)

    def to_tokens(self, x_BSHK: jax.Array) -> jax.Array:
        """All heads of this device's tokens, from a share of them of all neighbours'."""
        if self.heads < 2:
            return x_BSHK
        return self._exchanged(x_BSHK, apart=1, together=2)

    def _exchanged(self, x: jax.Array, *, apart: int, together: int) -> jax.Array:
        groups = self._neighbours
        return lax.all_to_all(x, SHARDS, apart, together, tiled=True, axis_index_groups=groups)

    @property
    def _group(self) -> int:
        """Neighbours whose tokens follow one another: those of a group of a ring, or all."""
        return self.size // self.ring

    @property
    def _sharers(self) -> list[list[int]]:
        """The devices of every sequence."""
        return _groups(self.size, self.apart)

    @property
    def _neighbours(self) -> list[list[int]]:
        """The devices of every group that exchanges heads."""
        return _groups(self.heads, self.apart)

    def deal(self, values: Any, dp: int) -> Any:
        """A batch's `[M, B, L, ...]` as `[M, B * size, L / size, ...]`, whose second axis dp cuts.

        >>> import numpy as np
        >>> ContextParallel(2).deal(np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]]), dp=2).tolist()
        [[[1, 2], [5, 6], [3, 4], [7, 8]]]
        >>> ContextParallel(2, heads=1).deal(np.array([[[1, 2, 3, 4]]]), dp=2).tolist()
        [[[1, 4], [2, 3]]]
        >>> ContextParallel(4, heads=2).deal(np.array([[[1, 2, 3, 4]]]), dp=4).tolist()
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


def _groups(size: int, apart: int) -> list[list[int]]:
    """All replicas in groups of so many, each so far from the next of its group."""
    replicas = range(lax.axis_size(SHARDS))
    block = size * apart
    return [
        list(replicas[begin + first : begin + block : apart])
        for begin in replicas[::block]
        for first in range(apart)
    ]


def deal_batch(
    batch: dict[str, Any], *, slices: int, cp: int, dp: int, heads: int = 0
) -> dict[str, Any]:
    """A batch of leaves `[M, B, L, ...]` as the pipeline takes it.

    Sequences are cut into `slices` in time, each of which is a microbatch, and a leaf `slice` then
    says which; stretches of these go to the `cp` replicas that share them, of which so many
    neighbours exchange `heads`.

    >>> import numpy as np
    >>> tokens = np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    >>> dealt = deal_batch({"inputs": tokens}, slices=2, cp=1, dp=1)
    >>> dealt["inputs"].tolist(), dealt["slice"].tolist()
    ([[[1, 2], [5, 6]], [[3, 4], [7, 8]]], [[0, 0], [1, 1]])
    """
    replicas = ContextParallel(cp, heads)

    def dealt(values: Any) -> Any:
        m, b, length, *rest = values.shape
        parts = values.reshape(m, b, slices, length // slices, *rest).swapaxes(1, 2)
        return replicas.deal(parts.reshape(m * slices, b, length // slices, *rest), dp)

    leaves = {name: dealt(values) for name, values in batch.items()}
    if slices == 1:
        return leaves
    rows, examples = next(iter(leaves.values())).shape[:2]
    which = np.arange(rows, dtype=np.int32)[:, None] % slices
    return leaves | {"slice": np.broadcast_to(which, (rows, examples))}
