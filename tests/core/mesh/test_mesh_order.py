"""The order of devices in the mesh: that of jax's helper for clusters of hosts."""

from dataclasses import dataclass

import numpy as np
import pytest
from jax.experimental import mesh_utils

from jaxpipe.core.mesh import make_mesh


@dataclass(frozen=True)
class Gpu:
    """The device attributes that jax's helper reads."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


@pytest.mark.parametrize(
    ("shape", "per_host", "inside"),
    [
        ((4, 1, 8), 8, (1, 1, 8)),
        ((4, 2, 4), 8, (1, 2, 4)),
        ((8, 4, 1), 8, (2, 4, 1)),
        ((2, 16, 2), 8, (1, 4, 2)),
        ((4, 4, 2), 4, (1, 2, 2)),
    ],
)
@pytest.mark.parametrize("pipeline_first", [False, True])
def test_hosts_hold_what_is_close(monkeypatch, shape, per_host, inside, pipeline_first):
    """tp inside a host, then dp (or pp) as far as it fits; hosts along the remaining axes."""
    pp, dp, tp = shape
    devices = [Gpu(i, i // per_host) for i in range(pp * dp * tp)]
    monkeypatch.setattr("jaxpipe.core.mesh.mesh.Mesh", lambda grid, *_, **__: grid)
    got = make_mesh(pp, dp, tp, devices, pipeline_first=pipeline_first)
    outer = (dp, pp) if pipeline_first else (pp, dp)
    if pipeline_first:
        room = per_host // tp
        near = np.gcd(pp, room)
        inside = (room // near, near, tp)
    want = mesh_utils.create_hybrid_device_mesh(
        inside,
        tuple(size // own for size, own in zip((*outer, tp), inside)),
        devices,
        process_is_granule=True,
    )
    want = want.swapaxes(0, 1) if pipeline_first else want
    assert got.reshape(want.shape).tolist() == want.tolist()
