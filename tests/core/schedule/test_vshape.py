"""The V-shaped orders against PyTorch's, and against the published figures."""

from pathlib import Path

import pytest
from orders import build

from jaxpipe.core.schedule import Costs, simulate, validate
from jaxpipe.core.schedule.orders.vshape import zbv_order

DATA = Path(__file__).parents[2] / "data"
# PyTorch 2.13.0, ScheduleZBVZeroBubble.pipeline_order, P = 4.
PYTORCH = {
    4: [
        "0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0I0 0W0 0I1 0W1 0I2 0W2 "
        "0I3 0W3",
        "1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1I0 1W0 6I3 6W3 1I1 1W1 1I2 1W2 "
        "1I3 1W3",
        "2F0 2F1 2F2 5F0 2F3 5F1 5F2 5I0 5W0 5F3 5I1 5W1 2I0 2W0 5I2 5W2 2I1 2W1 5I3 5W3 2I2 2W2 "
        "2I3 2W3",
        "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3I0 3W0 4I1 4W1 3I1 3W1 4I2 4W2 3I2 3W2 4I3 4W3 "
        "3I3 3W3",
    ],
    8: [
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 "
        "7F4 7I4 7W4 0I1 0W1 7F5 7I5 7W5 0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7 0I4 0W4 0I5 0W5 "
        "0I6 0W6 0I7 0W7",
        "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3 6W3 "
        "1F7 1I1 1W1 6F5 6I4 6W4 1I2 1W2 6F6 6I5 6W5 1I3 1W3 6F7 6I6 6W6 1I4 6I7 1I5 1W4 1I6 1W5 "
        "1I7 1W6 6W7 1W7",
        "2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6 2I1 2W1 "
        "5F5 5I3 5W3 2F7 2I2 2W2 5F6 5I4 5W4 2I3 2W3 5F7 5I5 5W5 2I4 5I6 2I5 5I7 2I6 2W4 2I7 2W5 "
        "5W6 5W7 2W6 2W7",
        "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 "
        "3F6 3I2 3W2 4F6 4I3 4W3 3F7 3I3 3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 3W4 4W5 4W6 "
        "4W7 3W5 3W6 3W7",
    ],
}


@pytest.mark.parametrize("microbatches", PYTORCH)
def test_the_order_of_zbv_equals_pytorchs(microbatches):
    order = zbv_order(4, microbatches)
    validate(order)
    assert [" ".join(rank) for rank in order.notation()] == PYTORCH[microbatches]


@pytest.mark.parametrize("pp", range(1, 17))
def test_zbv_has_no_bubble_at_equal_costs_and_1f1bs_memory(pp):
    for microbatches in (2 * pp - 1, 2 * pp, 3 * pp + 1):
        report = simulate(build("zbv", pp=pp, microbatches=microbatches))
        assert report.bubble_span == pytest.approx(0, abs=1e-12)
        assert report.makespan == pytest.approx(6 * microbatches + pp - 1)
        assert set(report.peak_until_w) == {2 * pp}


@pytest.mark.parametrize("pp", range(1, 15))
def test_1f1b_on_the_v_holds_two_thirds_for_a_shorter_bubble(pp):
    """All ranks have one peak; the bubble is 5/6 of 1F1B's if the block has no gap, else less."""
    for microbatches in (2 * pp, 3 * pp + 1):
        one = simulate(build("1f1b", pp=pp, microbatches=microbatches), Costs(2, 2, 2))
        schedule = build("1f1b_v", pp=pp, microbatches=microbatches)
        report = simulate(schedule)
        idle, of_1f1b = report.makespan - 6 * microbatches, one.makespan - 6 * microbatches
        assert set(report.peak_until_w) == {2 * -(-(2 * pp + 1) // 3)}
        assert idle <= of_1f1b * 5 / 6
        if pp % 3 == 1:
            assert idle == 5 * (pp - 1)


def test_1f1b_on_the_v_in_the_published_case():
    """P = 4, M = 8: six in flight on every rank, a bubble of 23.8 %."""
    report = simulate(build("1f1b_v", pp=4, microbatches=8))
    assert report.peak_until_w == (6, 6, 6, 6)
    assert round(report.bubble_global, 3) == 0.238
