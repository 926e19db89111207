"""What replicas that share sequences do together, and how a batch is cut and dealt to them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxpipe.parallel.mesh import DP
from jaxpipe.partition.sequence import WholeSequence


@dataclass(frozen=True)
class ContextParallel(WholeSequence):
    """`size` neighbours along the mesh's dp axis share every sequence, in the order of its tokens.

    They are replicas like any others: parameters and gradients know of dp alone. The gradient of
    what was gathered is summed and scattered, which is the transpose of the gather.
    """

    def start(self, own: int) -> jax.Array:
        """Where in the sequence this device's stretch of `own` tokens begins."""
        return lax.axis_index(DP) % self.size * own

    def gather(self, x: jax.Array) -> jax.Array:
        """The `[B, L, ...]` of all tokens, from `[B, L / size, ...]`."""
        replicas = range(lax.axis_size(DP))
        groups = [list(replicas[i : i + self.size]) for i in replicas[:: self.size]]
        return lax.all_gather(x, DP, axis=1, tiled=True, axis_index_groups=groups)

    def deal(self, values: Any, dp: int) -> Any:
        """A batch's `[M, B, L, ...]` as `[M, B * size, L / size, ...]`, whose second axis dp cuts.

        >>> import numpy as np
        >>> ContextParallel(2).deal(np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]]), dp=2).tolist()
        [[[1, 2], [5, 6], [3, 4], [7, 8]]]
        """
        m, b, length, *rest = values.shape
        groups = dp // self.size
        parts = values.reshape(m, groups, b // groups, self.size, length // self.size, *rest)
        return parts.swapaxes(2, 3).reshape(m, b * self.size, length // self.size, *rest)


def deal_batch(batch: dict[str, Any], *, slices: int, cp: int, dp: int) -> dict[str, Any]:
    """A batch of leaves `[M, B, L, ...]` as the pipeline takes it.

    Sequences are cut into `slices` in time, each of which is a microbatch, and a leaf `slice` then
    says which; stretches of these go to the replicas that share them.

    >>> import numpy as np
    >>> tokens = np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    >>> dealt = deal_batch({"inputs": tokens}, slices=2, cp=1, dp=1)
    >>> dealt["inputs"].tolist(), dealt["slice"].tolist()
    ([[[1, 2], [5, 6]], [[3, 4], [7, 8]]], [[0, 0], [1, 1]])
    """
    replicas = ContextParallel(cp)

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
