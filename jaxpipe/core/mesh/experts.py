"""The all-to-all between devices that share the experts of a layer."""

from dataclasses import dataclass, replace

import jax
from jax import lax

from jaxpipe.core.contract.experts import AllExperts
from jaxpipe.core.mesh.groups import strided_groups
from jaxpipe.core.mesh.mesh import EP, TP


@dataclass(frozen=True)
class ExpertParallel(AllExperts):
    """`size` devices along ep, or along ep and tp, each with a shard of the experts.

    Two neighbours are `stride` devices apart. The exchange is its own transpose. Its blocks have
    equal sizes because `ragged_all_to_all` does not run on XLA:CPU (jaxlib 0.12.0).
    """

    stride: int = 1

    @property
    def between_hosts(self) -> "ExpertParallel":
        """See `AllExperts`."""
        return replace(self, size=self.size // self.per_host, stride=self.per_host, per_host=1)

    @property
    def in_host(self) -> "ExpertParallel":
        """See `AllExperts`."""
        return replace(self, size=self.per_host, per_host=1)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the devices; neighbours along the last have consecutive experts."""
        return (EP, TP) if self.over_tp else (EP,)

    def exchange(self, rows: jax.Array) -> jax.Array:
        """All-to-all of `[size, ...]`: block i goes to device i; results are in device order."""
        count = lax.axis_size(self.axes)
        groups = strided_groups(count, self.size, self.stride) if self.size < count else None
        return lax.all_to_all(
            rows, self.axes, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=groups
        )
