"""What replicas that share sequences do together, and how a batch is cut and dealt to them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.parallel.mesh import SHARDS
from jaxpipe.partition.sequence import Method, WholeSequence


@dataclass(frozen=True)
class ContextParallel(WholeSequence):
    """`size` neighbours among the replicas share every sequence.

    They are replicas like any others, along the mesh's axes dp and ep: parameters and gradients
    know of these alone, and they may have experts in parts too. Each has one
    stretch of its tokens, in their order; with `ring` two of twice as many, the i-th from the
    beginning and the i-th from the end, so that causal attention is as much work for all. The
    gradient of what was gathered is summed and scattered, which is the transpose of the gather.
    """

    def index(self) -> jax.Array:
        """This device's place among those that share its sequences."""
        return lax.axis_index(SHARDS) % self.size

    def start(self, own: int) -> jax.Array:
        """Where in the sequence this device's first token stands, of `own`."""
        return self.index() * (own // 2 if self.method == "ring" else own)

    def places(self, own: int) -> jax.Array:
        """Where in the sequence this device's `own` tokens stand, `[own]`."""
        if self.method != "ring":
            return self.start(own) + jnp.arange(own)
        half_L, last = jnp.arange(own // 2), 2 * self.size - 1 - self.index()
        return jnp.concatenate([self.start(own) + half_L, last * (own // 2) + half_L])

    def gather(self, x: jax.Array) -> jax.Array:
        """The `[B, L, ...]` of all tokens, from `[B, L / size, ...]`, in the order of devices."""
        return lax.all_gather(x, SHARDS, axis=1, tiled=True, axis_index_groups=self._groups)

    def turned(self, tree: Any) -> Any:
        """What the device before this one has, in a ring of those that share a sequence.

        A permute. Ranks of a pipeline are in different branches, where XLA's permutes on CPU, which
        know no groups, would take values of others: there it is a gather, of which one is taken.
        """
        pairs = [(group[i - 1], group[i]) for group in self._groups for i in range(self.size)]

        def gathered(x: jax.Array) -> jax.Array:
            every = lax.all_gather(x, SHARDS, axis_index_groups=self._groups)
            return lax.dynamic_index_in_dim(every, (self.index() - 1) % self.size, keepdims=False)

        def turned(x: jax.Array) -> jax.Array:
            permuted = lambda x: lax.ppermute(x, SHARDS, pairs)  # noqa: E731
            return lax.platform_dependent(x, cpu=gathered, default=permuted)

        return jax.tree.map(turned, tree)

    def to_heads(self, x_BLHK: jax.Array) -> jax.Array:
        """All tokens of this device's share of the heads, from its tokens of all `[B, L, H, K]`.

        Where there are fewer heads than devices, neighbours have the same one.
        """
        if copies := self.size // x_BLHK.shape[2]:
            x_BLHK = jnp.repeat(x_BLHK, copies, axis=2)
        return self._exchanged(x_BLHK, apart=2, together=1)

    def to_tokens(self, x_BSHK: jax.Array) -> jax.Array:
        """All heads of this device's tokens, from its heads of all tokens."""
        return self._exchanged(x_BSHK, apart=1, together=2)

    def _exchanged(self, x: jax.Array, *, apart: int, together: int) -> jax.Array:
        groups = self._groups
        return lax.all_to_all(x, SHARDS, apart, together, tiled=True, axis_index_groups=groups)

    @property
    def _groups(self) -> list[list[int]]:
        replicas = range(lax.axis_size(SHARDS))
        return [list(replicas[i : i + self.size]) for i in replicas[:: self.size]]

    def deal(self, values: Any, dp: int) -> Any:
        """A batch's `[M, B, L, ...]` as `[M, B * size, L / size, ...]`, whose second axis dp cuts.

        >>> import numpy as np
        >>> ContextParallel(2).deal(np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]]), dp=2).tolist()
        [[[1, 2], [5, 6], [3, 4], [7, 8]]]
        >>> ContextParallel(2, "ring").deal(np.array([[[1, 2, 3, 4]]]), dp=2).tolist()
        [[[1, 4], [2, 3]]]
        """
        m, b, length, *rest = values.shape
        groups, own = dp // self.size, length // self.size
        if self.method == "ring":
            halves = values.reshape(m, b, 2 * self.size, own // 2, *rest)
            order = [half for i in range(self.size) for half in (i, 2 * self.size - 1 - i)]
            values = halves[:, :, np.array(order)]
        parts = values.reshape(m, groups, b // groups, self.size, own, *rest)
        return parts.swapaxes(2, 3).reshape(m, b * self.size, own, *rest)


def deal_batch(
    batch: dict[str, Any], *, slices: int, cp: int, dp: int, method: Method = "gather"
) -> dict[str, Any]:
    """A batch of leaves `[M, B, L, ...]` as the pipeline takes it.

    Sequences are cut into `slices` in time, each of which is a microbatch, and a leaf `slice` then
    says which; stretches of these go to the replicas that share them.

    >>> import numpy as np
    >>> tokens = np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    >>> dealt = deal_batch({"inputs": tokens}, slices=2, cp=1, dp=1)
    >>> dealt["inputs"].tolist(), dealt["slice"].tolist()
    ([[[1, 2], [5, 6]], [[3, 4], [7, 8]]], [[0, 0], [1, 1]])
    """
    replicas = ContextParallel(cp, method)

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
