"""The (pp, rp, dp, ep, tp) mesh. tp varies fastest, so that its devices stay within a host.

A coordinate on pp is a pipeline rank. Data-parallel replicas are on three axes: rp, over which
nothing is sharded; dp; and ep, over which a model may shard parameters (experts). An axis that is
not used has size 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpipe.core.contract.parameter import DP, EP, PP, REPLICA_AXES, RP, TP, ZERO_AXES

__all__ = ["DP", "EP", "PP", "REPLICA_AXES", "RP", "TP", "ZERO_AXES", "ReplicaFactors", "make_mesh"]


class ReplicaFactors(NamedTuple):
    """Factors of the number of replicas.

    Attributes:
      rp: number of replica groups that hold all shards (HSDP).
      ep: number of replicas that share the experts of a layer.
    """

    rp: int = 1
    ep: int = 1


def make_mesh(
    pp: int,
    dp: int = 1,
    tp: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    pipeline_first: bool = False,
    factors: ReplicaFactors = ReplicaFactors(),  # noqa: B008
) -> Mesh:
    """The mesh; device `(p * dp + d) * tp + t` is pipeline rank p, replica d and tp index t.

    With `pipeline_first` it is device `(d * pp + p) * tp + t`: neighbouring pipeline ranks are
    close and replicas are distant. The order of devices changes no number. Replica d is at the
    coordinates of rp, dp and ep that count it, ep fastest; the mesh axis dp has the replicas that
    `factors` leave.

    Axes are `Auto`: arguments may arrive in any sharding and are moved, whereas jax's default
    (`Explicit`) would reject them.

    Args:
      pp: pipeline ranks.
      dp: data-parallel replicas.
      tp: devices that share every layer.
      devices: pp * dp * tp devices; None: all devices.
      pipeline_first: order of devices, as above.
      factors: how many of the replicas are on rp and on ep.

    Raises:
      ValueError: the number of devices differs, or rp * ep does not divide dp.

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
