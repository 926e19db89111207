"""The (pp, rp, dp, ep, tp) mesh. A coordinate on pp is a rank; tp varies fastest, so it stays in a
host.

Replicas are on three axes: rp, over which nothing is cut, dp, and ep, over which alone a leaf may
be. Where these are not wanted they have a single coordinate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpipe.partition.leaf import DP, EP, PP, REPLICAS, RP, SHARDS, TP

__all__ = ["DP", "EP", "PP", "REPLICAS", "RP", "SHARDS", "TP", "Factors", "make_mesh"]


class Factors(NamedTuple):
    """Of the number of replicas: how many have all parts each, and how many are on ep."""

    rp: int = 1
    ep: int = 1


def make_mesh(
    pp: int,
    dp: int = 1,
    tp: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    pipeline_first: bool = False,
    factors: Factors = Factors(),  # noqa: B008
) -> Mesh:
    """Mesh with device `(p * dp + d) * tp + t` at rank p, replica d and place t in a layer.

    With `pipeline_first` it is device `(d * pp + p) * tp + t`: neighbouring ranks are close and
    replicas far apart. Which device stands where changes no number. Replica d is at the coordinates
    of rp, dp and ep that count it, ep fastest; dp's size is what `factors` leave of the replicas.

    Axes are `Auto`: arguments may come in any sharding and are moved, where jax's default
    (`Explicit`) would reject them. Raises `ValueError` unless pp * dp * tp devices are given
    (`devices`; None: all there are) and the factors divide dp.

    >>> dict(make_mesh(pp=1, devices=jax.devices()[:1]).shape)
    {'pp': 1, 'rp': 1, 'dp': 1, 'ep': 1, 'tp': 1}
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != pp * dp * tp:
        raise ValueError(
            f"pp={pp} x dp={dp} x tp={tp} needs {pp * dp * tp} devices, got {len(devices)}."
        )
    rp, ep = factors
    if dp % (rp * ep):
        raise ValueError(
            f"rp={rp} x ep={ep} must divide dp={dp}: they are factors of the replicas."
        )
    ranks = np.asarray(devices)
    near = ranks.reshape(dp, pp, tp).swapaxes(0, 1)
    grid = near if pipeline_first else ranks.reshape(pp, dp, tp)
    grid = grid.reshape(pp, rp, dp // (rp * ep), ep, tp)
    return Mesh(grid, (PP, RP, DP, EP, TP), axis_types=(AxisType.Auto,) * 5)
