"""Programs whose collectives XLA for CPUs could begin in any order are not stored."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
from jaxpipe.runtime.environment import use_cpu_devices
use_cpu_devices(2)
import jax
from jax import lax
from jax.sharding import PartitionSpec

def ordered(x):
    total = lax.psum(x, "i")
    return total, lax.cond(total[0] > 0, lambda y: lax.psum(y * y, "i"), lambda y: y, total)

def free(x):
    branch = lax.cond(x[0] > 0, lambda y: lax.psum(y * y, "i"), lambda y: y, x)
    return lax.psum(x, "i"), branch

def looped(x):
    loop = lax.fori_loop(0, 3, lambda i, y: lax.psum(y, "i") / 2, x)
    return lax.psum(x, "i"), loop

def side_by_side(x):
    return lax.psum(x, "i"), lax.ppermute(x, "i", [(0, 1), (1, 0)])

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
spec = PartitionSpec("i")
for function in (ordered, free, looped, side_by_side):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.jit(mapped)(jax.numpy.ones(4))
"""


@pytest.mark.versions
def test_only_programs_with_ordered_collectives_are_stored(tmp_path):
    """Collectives side by side keep their order when they are loaded; nested ones do not."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True)
    stored = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert {"jit_ordered", "jit_side_by_side"} <= stored
    assert not {"jit_free", "jit_looped"} & stored
