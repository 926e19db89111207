"""Searched schedules in the executor: programs that tests/core runs too, or that run here."""

import pytest
from legal import SEARCHED, near
from signature import CASES, signature, signature_of
from step_memory import X, check_rings, growth, size
from toy_steps import check, uneven

from jaxpipe.core.schedule import Lockstep, lower


@pytest.mark.parametrize("name", SEARCHED)
def test_the_executor_is_tested_with_the_program_of_every_search(name):
    """Tables of one signature lead to one program, up to numbers and sizes."""
    tested = {signature_of(*case) for case in CASES}
    for pp in (1, 2, 4):
        for microbatches in (1, pp + 3):
            schedule = near(name, pp, microbatches)
            for transfer_ticks in (1, 2):
                tables = lower(schedule, Lockstep(transfer_ticks))
                assert signature(tables) in tested, (pp, microbatches, transfer_ticks)


@pytest.mark.extended(unless=["v_half"])
@pytest.mark.parametrize("name", SEARCHED)
def test_a_step_equals_the_reference(name):
    schedule = near(name, 4, 7)
    check(schedule, uneven(schedule.stages), 2, lockstep=Lockstep(1))


@pytest.mark.slow(unless=["v_half-full"])
@pytest.mark.parametrize(
    ("name", "remat"), [("zb_auto", "none"), ("v_half", "full"), ("v_min", "none")]
)
def test_memory_is_the_rings_and_one_tick(name, remat):
    check_rings(name, remat, near)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_memory_is_flat_in_microbatches(name):
    """Except for ring buffers, which a search may make shorter where there are few microbatches."""
    besides, _ = growth(name, near)
    assert besides <= 0.02 * size(X)
