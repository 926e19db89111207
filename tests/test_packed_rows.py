"""Documents that share rows, on whole meshes, against each of them alone on one device."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run


def check(*args, **how):
    with jax.enable_x64(True):
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 2), ("dualpipe", 4)])
def test_schedules_of_packed_rows(schedule, pp):
    check("packed", schedule, pp, 1, 1)
