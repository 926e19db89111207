"""Layers of stages by the time of every layer (`parallel.layer_split = "balanced"`)."""

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from jaxpipe.config import Config
from jaxpipe.core.schedule import Placement
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import Hardware, LayerSeconds, op_seconds
from jaxpipe.planning.cost.seconds import LayerShare
from jaxpipe.schedules import LIMITS, shorter_and_shorter

_OPS = ("F", "B", "W")


def balanced_splits(
    config: Config, placement: Placement, hardware: Hardware
) -> Iterator[tuple[int, ...]]:
    """Yield the balanced layer split and, under a limit in bytes, ones of smaller largest stages.

    A stage's size is what its layers keep of a microbatch from F to W. Whether a split is within
    `parallel.memory_limit` is for the caller to find out, from its layer slots: a rank has a slot
    for each kind that any stage of the chunk needs, which the layers of one stage do not tell.
    """
    kinds = costs_of(config).kinds
    sizes = {name: kind.for_b + kind.for_w + kind.stash for name, kind in kinds.items()}
    limit = config.parallel.memory_limit
    in_bytes = isinstance(limit, str) and limit not in ("", *LIMITS)
    return islice(
        shorter_and_shorter(
            layer_seconds(config, hardware), placement, [sizes[k] for k in costs_of(config).order]
        ),
        None if in_bytes else 1,
    )


def layer_seconds(config: Config, hardware: Hardware) -> tuple[float, ...]:
    """Return the seconds of F, B and W of every layer for one microbatch or slice on one device.

    Embedding and head count in the first and the last layer, unless all pipeline ranks share them.
    Of measured seconds, which are means over layers, each kind has a share as by its kernels and
    its bytes over ep. A run's own measurements are not used, since each start of a run must decide
    alike; copies with the host are not counted.
    """
    if config.parallel.costs == "measure":
        config = replace(config, parallel=replace(config.parallel, costs=""))
    seconds, order = op_seconds(config, hardware), costs_of(config).order

    def total(op: LayerSeconds) -> float:
        return op.F + op.B + op.W + op.R

    layers = [
        sum(getattr(share, op) * getattr(seconds.layer, op) for op in _OPS)
        + share.F * seconds.layer.R
        + share.exchange * total(seconds.exchange)
        + total(seconds.sharing)
        for share in seconds.shares or (LayerShare(),) * len(order)
    ]
    if not config.parallel.vocab_shared_by:
        layers[0] += seconds.embed + seconds.embed_gradient
        layers[-1] += seconds.head
    return tuple(layers)
