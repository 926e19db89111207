"""Seconds of what a device computes: its layers, and bytes of the update of its parameters."""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from jaxpipe.config import Config
from jaxpipe.planning.cost.costs import ITEMSIZE, LayerCosts, costs_of
from jaxpipe.planning.cost.kernels import Operations
from jaxpipe.planning.cost.machine import Hardware
from jaxpipe.planning.cost.seconds import LayerSeconds
from jaxpipe.planning.cost.state_sizes import FLOAT32, stored_values

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout

OPS = ("F", "B", "W", "BW", "R")
_OF_PARAMETERS = 3  # kernels of an op for each parameter, at most, that both halves share


def seconds_by_kind(config: Config, hardware: Hardware) -> dict[str, LayerSeconds]:
    """Seconds of F, B, W, BW and R of a layer of every kind, without collectives.

    To the kernels of an op come copies of what F and B leave in ring buffers, and of what B and W
    read out of them.
    """
    found = {}
    for name, kind in costs_of(config).kinds.items():
        kept, stash = kind.for_b + kind.for_w, kind.stash
        copied = {
            "F": 2 * (kind.for_r or kept),
            "B": kept + 2 * stash,
            "W": kind.for_w + stash,
            "BW": kept,
            "R": kind.for_r and kind.for_r + 2 * kept,
        }
        found[name] = LayerSeconds(
            *(hardware.seconds(kind.kernels[op]) + hardware.copying(copied[op]) for op in OPS)
        )
    return found


def launches_of_halves(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds of kernel launches that halves add to the mean layer (`overlap_halves`), at least.

    Every kernel that reads activations or their gradients runs once for each half. Kernels that
    both halves share are those of a parameter: its cast, the product of its gradient, and what
    rounds the gradient.
    """

    def more(kind: LayerCosts, op: str) -> float:
        shared = _OF_PARAMETERS * kind.parameters.n_arrays
        return hardware.seconds(Operations(launches=max(0.0, kind.kernels[op].launches - shared)))

    return LayerSeconds(*(costs_of(config).mean(partial(more, op=op)) for op in OPS))


def update_bytes(config: Config, layout: "StageLayout") -> float:
    """Bytes of its memory that a device reads and writes to update its parameters.

    Parameters and moments are read and written, gradients read, and parameters cast for the ops.
    """
    by_kind, (embed_head, _) = stored_values(config)
    counts = Counter(layout.slot_kinds)
    trained = [(1, embed_head), *((count, by_kind[kind][0]) for kind, count in counts.items())]
    item = ITEMSIZE[config.train.compute_dtype]
    return sum(
        count * ((3 * FLOAT32 + item) * one.shard + 2 * one.moments) for count, one in trained
    )
