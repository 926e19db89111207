"""What replicas that have experts in parts do together."""

from dataclasses import dataclass

import jax
from jax import lax

from jaxpipe.parallel.mesh import EP
from jaxpipe.partition.experts import AllExperts


@dataclass(frozen=True)
class ExpertParallel(AllExperts):
    """`size` neighbouring replicas along the mesh's ep axis, each with its part of the experts.

    The exchange is its own transpose. It is of equal parts and not ragged, as `ragged_all_to_all`
    does not run on XLA:CPU (jaxlib 0.12.0).
    """

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Of `[size, ...]` the i-th part to device i; what comes back has theirs in order."""
        return lax.all_to_all(rows, EP, split_axis=0, concat_axis=0, tiled=True)
