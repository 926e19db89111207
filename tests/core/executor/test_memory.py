"""The compiled step's memory against the memory that the tables imply."""

from itertools import cycle

import pytest
from programs import LAYERS_EACH
from step_memory import X, check_rings, growth, measured, size

from jaxpipe.core.schedule import ORDERS

GROWS = {"gpipe", "bfs"}  # every microbatch has its F before any has its B
FLAT = [name for name in ORDERS if name not in GROWS]


@pytest.mark.extended
@pytest.mark.slow(unless=["1f1b-none", "zbv-full"])
@pytest.mark.parametrize(("name", "remat"), [*zip(FLAT, cycle(("none", "full")))])
def test_memory_is_the_rings_and_one_tick(name, remat):
    check_rings(name, remat)


@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("name", FLAT)
def test_memory_is_flat_in_microbatches(name):
    besides, rings = growth(name)
    assert besides <= 0.02 * size(X)
    assert rings == 0


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(GROWS))
def test_memory_grows_by_the_residuals(name):
    (small, _), (large, _) = (measured(name, 4, m, "full") for m in (8, 40))
    assert (large - small) / 32 >= LAYERS_EACH * size(X)
