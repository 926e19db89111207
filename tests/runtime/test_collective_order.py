"""Programs that XLA for CPUs could not load again are not stored."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.config import ConfigError
from jaxpipe.runtime.environment import use_cpu_devices
from jaxpipe.runtime.programs.collective_order import most_at_once, why_not_loadable


def ordered(x):
    total = lax.psum(x, "i")
    return total, lax.cond(total[0] > 0, lambda y: lax.psum(y * y, "i"), lambda y: y, total)


def free(x):
    branch = lax.cond(x[0] > -9, lambda y: lax.psum(y * y, "i"), lambda y: y, x)
    return lax.psum(x, "i"), branch


def looped(x):
    loop = lax.fori_loop(0, 3, lambda i, y: lax.psum(y, "i") / 2, x)
    return lax.psum(x, "i"), lax.ppermute(x, "i", [(0, 1), (1, 0)]), loop


def in_a_branch(x):
    """Only one of two branches runs, beside two loops."""
    loops = [lax.fori_loop(0, 3, lambda i, y, n=n: lax.psum(y, "i") / n, x) for n in (2, 3)]
    return lax.cond(x[0] > -9, free, looped_twice, x), loops


def looped_twice(x):
    return lax.psum(x, "i"), lax.fori_loop(0, 2, lambda i, y: lax.psum(y, "i") / 2, x)


def side_by_side(x):
    return lax.psum(x, "i"), lax.ppermute(x, "i", [(0, 1), (1, 0)])


def after_each_other(x):
    loop = lax.fori_loop(0, 3, lambda i, y: lax.psum(y, "i") / 2, x)
    return lax.psum(loop, "i")


def mapped(function):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def compiled(function):
    return mapped(function).lower(jnp.ones(4)).compile().runtime_executable()


@pytest.mark.parametrize(
    ("function", "most"),
    [(ordered, 1), (free, 2), (looped, 2), (side_by_side, 1), (after_each_other, 1),
     (in_a_branch, 4)],
)  # fmt: skip
def test_a_device_is_in_as_many_collectives_at_once(function, most):
    (module,) = compiled(function).hlo_modules()
    assert most_at_once(module.to_string()) == most


def test_every_collective_of_every_device_needs_a_thread(monkeypatch):
    program = compiled(free)
    monkeypatch.setenv("NPROC", "4")
    assert why_not_loadable(program) == ""
    monkeypatch.setenv("NPROC", "3")
    assert why_not_loadable(program).startswith("4 threads could wait in its collectives")


def test_several_processes_need_collectives_in_order(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert why_not_loadable(compiled(free)) == "data do not order its collectives"
    assert why_not_loadable(compiled(ordered)) == ""


SCRIPT = """
import sys
from jaxpipe.runtime.environment import use_cpu_devices
use_cpu_devices(2)
import jax
import jax.numpy as jnp
from test_collective_order import free, mapped, ordered
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append("cache_hits" in event))
for function in (ordered, free):
    print(*(value for array in mapped(function)(jnp.arange(4.0)) for value in array.tolist()))
print(sum(hits))
"""


@pytest.mark.extended
@pytest.mark.versions
def test_a_program_is_stored_and_loaded_if_there_are_threads_and_computes_the_same(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def loaded(threads):
        """Return the number of programs that were loaded, after the values were compared."""
        command = [sys.executable, "-c", SCRIPT]
        *values, hits = subprocess.run(
            command, env=environment | {"NPROC": threads}, check=True, capture_output=True
        ).stdout.split()
        sums, of_squares = [2, 4] * 2, [4, 10] * 2  # of [0, 1] and [2, 3], on both devices
        expected = [*sums, *2 * np.square(sums), *sums, *of_squares]
        assert list(map(float, values)) == expected
        return int(hits)

    def stored():
        return [path.name.split("-")[0] for path in tmp_path.iterdir()]

    assert loaded("3") == 0
    assert "jit_ordered" in stored()
    assert "jit_free" not in stored()
    assert loaded("4") == 0
    assert "jit_free" in stored()
    assert loaded("4") > loaded("3") > 0
    assert loaded("5") == 0


def test_a_number_of_threads_that_is_none_is_refused(monkeypatch):
    for value in ("auto", "0", "-1"):
        monkeypatch.setenv("NPROC", value)
        with pytest.raises(ConfigError, match=f"NPROC={value} is no number of threads"):
            use_cpu_devices(2)
