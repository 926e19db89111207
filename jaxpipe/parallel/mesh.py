"""The (pp, dp, tp) mesh. A coordinate on pp is a rank; tp varies fastest, so it stays in a host."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

PP, DP, TP = "pp", "dp", "tp"


def make_mesh(
    pp: int, dp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Mesh with device `(p * dp + d) * tp + t` at coordinate (p, d, t).

    Axes are `Auto`: arguments may come in any sharding and are moved, where jax's default
    (`Explicit`) would reject them. Raises `ValueError` unless pp * dp * tp devices are given.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != pp * dp * tp:
        raise ValueError(
            f"pp={pp} x dp={dp} x tp={tp} needs {pp * dp * tp} devices, got {len(devices)}."
        )
    grid = np.asarray(devices).reshape(pp, dp, tp)
    return Mesh(grid, (PP, DP, TP), axis_types=(AxisType.Auto,) * 3)
