"""The all-to-all between devices that share the experts of a layer."""

from dataclasses import dataclass

import jax
from jax import lax

from jaxpipe.core.contract.experts import AllExperts
from jaxpipe.core.mesh.mesh import EP, TP


@dataclass(frozen=True)
class ExpertParallel(AllExperts):
    """`size` neighbouring devices along ep, or along ep and tp, each with a shard of the experts.

    The exchange is its own transpose. Its blocks have equal sizes because `ragged_all_to_all` does
    not run on XLA:CPU (jaxlib 0.12.0).
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the devices; neighbours along the last have consecutive experts."""
        return (EP, TP) if self.over_tp else (EP,)

    def exchange(self, rows: jax.Array) -> jax.Array:
        """All-to-all of `[size, ...]`: block i goes to device i; results are in device order."""
        return lax.all_to_all(rows, self.axes, split_axis=0, concat_axis=0, tiled=True)
