"""The (pp, dp, ep, tp) mesh. A coordinate on pp is a rank; tp varies fastest, so it stays in a
host.

Replicas are on two axes, dp and ep: a leaf may be cut over the inner one, ep, alone. Where nothing
is, ep has a single coordinate.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpipe.partition.leaf import DP, EP, PP, REPLICAS, TP

__all__ = ["DP", "EP", "PP", "REPLICAS", "TP", "make_mesh"]


def make_mesh(
    pp: int,
    dp: int = 1,
    tp: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    pipeline_first: bool = False,
    ep: int = 1,
) -> Mesh:
    """Mesh with device `(p * dp + d) * tp + t` at rank p, replica d and place t in a layer.

    With `pipeline_first` it is device `(d * pp + p) * tp + t`: neighbouring ranks are close and
    replicas far apart. Which device stands where changes no number. Replica d is at coordinate
    (d div ep, d mod ep) of the axes dp and ep.

    Axes are `Auto`: arguments may come in any sharding and are moved, where jax's default
    (`Explicit`) would reject them. Raises `ValueError` unless pp * dp * tp devices are given
    (`devices`; None: all there are) and ep divides dp.

    >>> dict(make_mesh(pp=1, devices=jax.devices()[:1]).shape)
    {'pp': 1, 'dp': 1, 'ep': 1, 'tp': 1}
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != pp * dp * tp:
        raise ValueError(
            f"pp={pp} x dp={dp} x tp={tp} needs {pp * dp * tp} devices, got {len(devices)}."
        )
    if dp % ep:
        raise ValueError(f"ep={ep} must divide dp={dp}: it is a factor of the replicas.")
    ranks = np.asarray(devices)
    near = ranks.reshape(dp, pp, tp).swapaxes(0, 1)
    grid = near if pipeline_first else ranks.reshape(pp, dp, tp)
    grid = grid.reshape(pp, dp // ep, ep, tp)
    return Mesh(grid, (PP, DP, EP, TP), axis_types=(AxisType.Auto,) * 4)
