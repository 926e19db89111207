"""Bytes that a device sends for its parameters and their gradients."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.config import Config
from jaxpipe.planning.cost.costs import ITEMSIZE
from jaxpipe.planning.cost.state_sizes import FLOAT32, StoredValues, stored_values

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout


def mirrored_bytes(config: Config, layout: "StageLayout") -> int:
    """Bytes that a rank of a bidirectional schedule sends per step for its second copy of a stage.

    Parameters are sent in the compute dtype, and the sums of their gradients return in float32.
    """
    if not layout.mirrored:
        return 0
    by_kind, _ = stored_values(config)

    def sent(values: StoredValues) -> int:
        return values.shard if config.parallel.reshards else values.full

    item = ITEMSIZE[config.train.compute_dtype]
    return sum(
        item * (sent(trained) + sent(frozen)) + FLOAT32 * sent(trained)
        for trained, frozen in (by_kind[kind] for kind in layout.slot_kinds)
    )


class StepTraffic(NamedTuple):
    """Bytes that a device sends once a step, outside of the scan.

    Attributes:
      summed: gradients that are all-reduced over all replicas.
      scattered: gradients that are reduce-scattered over the replicas of a group.
      across: shards of gradients that are all-reduced over groups (`parallel.dp_replicate`).
      gathered: parameters that are gathered over the replicas of a group.
      host: moments that come from the host and return.
    """

    summed: float
    scattered: float
    across: float
    gathered: float
    host: int


def step_traffic(config: Config, layout: "StageLayout") -> StepTraffic:
    """Return what a device with these stages sends once a step, outside of the scan.

    Below ZeRO stage 2 gradients are all-reduced, from it on reduce-scattered within each group of
    replicas and then all-reduced across groups; from stage 1 on parameters are gathered. Layers
    that every action gathers are in `across` alone (`collectives.resharding_of` has the rest).
    """
    parallel, train = config.parallel, config.train
    by_kind, embed_head = stored_values(config)
    counts = Counter(layout.slot_kinds)
    item, of_sum = ITEMSIZE[train.compute_dtype], ITEMSIZE[parallel.grad_reduce_dtype]
    every = [(1, embed_head), *((count, by_kind[kind]) for kind, count in counts.items())]
    moments = sum(count * trained.moments for count, (trained, _) in every)
    across = 2 * of_sum * sum(count * trained.across for count, (trained, _) in every)
    if parallel.reshards:
        every = every[:1]
    scattered = of_sum * sum(count * trained.reduced for count, (trained, _) in every)
    summed = 0.0
    if parallel.zero_stage < 2:
        summed, scattered, across = 2 * scattered + across, 0.0, 0.0
    gathered = sum(count * item * (one.full - one.shard) for count, both in every for one in both)
    host = 2 * moments if train.offload_moments else 0
    return StepTraffic(summed, scattered, across, gathered, host)


def layer_traffic(config: Config) -> dict[str, tuple[float, float]]:
    """Bytes of each layer kind that a device sends to gather it, and to reduce its gradient."""
    item, of_sum = (
        ITEMSIZE[name] for name in (config.train.compute_dtype, config.parallel.grad_reduce_dtype)
    )
    return {
        name: (item * sum(one.full - one.shard for one in both), of_sum * both[0].reduced)
        for name, both in stored_values(config)[0].items()
    }
