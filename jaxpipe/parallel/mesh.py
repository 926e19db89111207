"""The (pp, dp, tp) mesh. A coordinate on pp is a rank; tp varies fastest, so it stays in a host."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

PP, DP, TP = "pp", "dp", "tp"


def make_mesh(
    pp: int,
    dp: int = 1,
    tp: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    pipeline_first: bool = False,
) -> Mesh:
    """Mesh with device `(p * dp + d) * tp + t` at coordinate (p, d, t).

    With `pipeline_first` it is device `(d * pp + p) * tp + t`: neighbouring ranks are close and
    replicas far apart. Which device stands where changes no number.

    Axes are `Auto`: arguments may come in any sharding and are moved, where jax's default
    (`Explicit`) would reject them. Raises `ValueError` unless pp * dp * tp devices are given.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != pp * dp * tp:
        raise ValueError(
            f"pp={pp} x dp={dp} x tp={tp} needs {pp * dp * tp} devices, got {len(devices)}."
        )
    ranks = np.asarray(devices)
    near = ranks.reshape(dp, pp, tp).swapaxes(0, 1)
    grid = near if pipeline_first else ranks.reshape(pp, dp, tp)
    return Mesh(grid, (PP, DP, TP), axis_types=(AxisType.Auto,) * 3)
