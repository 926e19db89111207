"""Builders, validation and simulation against formulas and published figures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.peaks import peak_held
from orders import build, near, nearest_sizes

from jaxpipe.core.schedule import (
    ORDERS,
    Action,
    Cell,
    Costs,
    Lockstep,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    forward_only,
    simulate,
    validate,
)
from jaxpipe.core.schedule.placing import place

SIZES = st.tuples(st.integers(1, 16), st.integers(1, 48))


@pytest.mark.parametrize("name", ORDERS)
@given(pp=st.integers(1, 16), microbatches=st.integers(1, 64), v=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_every_builder_is_valid(name, pp, microbatches, v):
    schedule = near(name, pp, microbatches, v)
    validate(schedule)
    report = simulate(schedule)
    assert report.makespan > 0  # both clocks run to the end
    declared = peak_held(name, schedule.pp, schedule.microbatches, schedule.stages // schedule.pp)
    if name in ("zbv", "1f1b_v") and schedule.microbatches < 2 * schedule.pp:
        assert all(here <= most for here, most in zip(report.peak_until_w, declared))
    else:
        assert report.peak_until_w == declared


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(size=SIZES, times=st.tuples(*[st.floats(0.1, 4.0)] * 3))
@settings(max_examples=60, deadline=None)
def test_bubble_formula(name, size, times):
    """(P-1)(F+B+W) of idle time, for M >= P: (P-1)/(M+P-1) of the makespan."""
    pp, microbatches = size[0], max(size)
    f, b, w = times
    report = simulate(build(name, pp=pp, microbatches=microbatches), Costs(f, b, w))
    work = microbatches * (f + b + w)
    assert report.makespan == pytest.approx(work + (pp - 1) * (f + b + w))
    assert report.bubble_global == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert report.bubble_span == pytest.approx(report.bubble_global)


@given(size=SIZES)
@settings(max_examples=60, deadline=None)
def test_peaks(size):
    pp, microbatches = size
    one = simulate(build("1f1b", pp=pp, microbatches=microbatches))
    assert one.peak_until_w == tuple(min(microbatches, pp - r) for r in range(pp))
    assert one.peak_until_b == one.peak_until_w
    assert simulate(build("gpipe", pp=pp, microbatches=microbatches)).peak_until_w == (
        (microbatches,) * pp
    )


def test_the_1f1b_figure_of_four_stages_and_eight_microbatches():
    """PipeDream-2BW/flush, Fig. 2: warm-up 3, 2, 1, 0; then strict alternation; then drain."""
    orders = build("1f1b", pp=4, microbatches=8).notation()
    assert " ".join(orders[0]) == (
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    )
    assert " ".join(orders[2]) == (
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7"
    )
    assert simulate(build("1f1b", pp=4, microbatches=8)).makespan == 33  # F=B=W=1


def test_transfer_cost_of_1f1b():
    """(P-1)(F+B+W) + c[2(P-1)M/P + 2(P-2)] if P divides M: fitted to Megatron-style orders."""
    for pp, microbatches in [(2, 4), (4, 8), (4, 16), (8, 24)]:
        report = simulate(build("1f1b", pp=pp, microbatches=microbatches), Costs(transfer=0.25))
        extra = 0.25 * (2 * (pp - 1) * microbatches / pp + 2 * (pp - 2))
        assert report.makespan == pytest.approx(3 * (microbatches + pp - 1) + extra)


def test_costs_per_stage():
    report = simulate(build("gpipe", pp=2, microbatches=2), Costs(F=(1, 2), B=(1, 1), W=(1, 1)))
    # Rank 1: F 1-3, 3-5, BW 5-7, 7-9; rank 0 then BW 7-9, 9-11.
    assert report.makespan == 11
    assert report.max_span == 11


@pytest.mark.parametrize(
    ("pp", "microbatches", "efficiency"), [(2, 8, 0.79), (4, 16, 0.79), (8, 16, 0.82)]
)
def test_lockstep_of_one_op_a_tick(pp, microbatches, efficiency):
    """F and BW in one tick cost the longer one: design measurements give 0.76-0.80 of ideal."""
    costs = Costs(F=1, B=1, W=1)
    report = simulate(build("1f1b", pp=pp, microbatches=microbatches), costs)
    ideal = 3 * (microbatches + pp - 1)
    assert ideal / report.scan_makespan == pytest.approx(efficiency, abs=0.03)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 16), (8, 16)])
def test_pairing_f_with_bw_restores_the_ideal_lockstep(pp, microbatches):
    schedule = build("1f1b", pp=pp, microbatches=microbatches)
    report = simulate(schedule, lockstep=Lockstep(in_flight=2 * pp - 1))
    assert report.scan_makespan == 3 * (microbatches + pp - 1)


def test_transfers_in_the_scan():
    """One-tick transfers add one message a tick; with two ticks part of it can overlap."""
    schedule = build("1f1b", pp=4, microbatches=8)
    messages = len(place(schedule)) - 1
    for ticks, added in ((1, 1.0), (2, 0.8)):
        free = simulate(schedule, lockstep=Lockstep(ticks)).scan_makespan
        paid = simulate(schedule, Costs(transfer=0.25), Lockstep(ticks)).scan_makespan
        assert free < paid <= free + added * 0.25 * messages + 1e-12


@pytest.mark.parametrize(("in_flight", "efficiency"), [(None, 0.707), (15, 0.901), (32, 0.901)])
def test_two_tick_transfers_need_room(in_flight, efficiency):
    """Useful share of the time; asynchronous ranks would reach 64/71 = 0.901."""
    schedule, costs = build("1f1b", pp=8, microbatches=64), Costs(1, 1.3, 0.8)
    report = simulate(schedule, costs, Lockstep(2, in_flight))
    assert 1 - report.bubble_scan == pytest.approx(efficiency, abs=0.003)


def test_forward_only():
    validate(forward_only(Placement.loop(3), 4))
    report = simulate(forward_only(Placement.loop(3), 4))
    assert report.makespan == 6


GOOD = build("1f1b", pp=2, microbatches=2)


def F(stage, microbatch):
    return Cell.from_action(Action(Op.F, stage, microbatch))


def broken(rank, edit):
    order = list(GOOD.ranks[rank])
    edit(order)
    ranks = list(GOOD.ranks)
    ranks[rank] = tuple(order)
    return Schedule("broken", GOOD.placement, GOOD.microbatches, tuple(ranks))


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (0, lambda o: o.pop(), "stage 0, microbatch 1 has F1@0: it needs F and then BW"),
        (0, lambda o: o.append(o[0]), "F0@0 appears 2 times"),
        (0, lambda o: o.insert(0, o.pop()), "deadlock: rank 0 waits at BW1@0"),
        (1, lambda o: o.reverse(), "deadlock: rank 1 waits at BW1@1"),
        (1, lambda o: o.append(F(0, 0)), "rank 1, F0@0: stage 0 is on rank 0"),
        (
            1,
            lambda o: o.append(F(1, 2)),
            "rank 1, F2@1: stage or microbatch out of range",
        ),
        (
            1,
            lambda o: o.append(Cell.from_action(Action(Op.W, 1, 0))),
            "stage 1, microbatch 0 has F0@1 W0@1 BW0@1",
        ),
    ],
)
def test_validate_names_the_broken_cell(rank, edit, message):
    with pytest.raises(ScheduleError, match=message):
        validate(broken(rank, edit))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
@given(
    pp=st.integers(1, 9),
    more=st.integers(0, 9),
    rounds=st.integers(1, 4),
    rest=st.integers(0, 9),
    slices=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_groups_of_any_size_and_a_rest_are_valid(name, pp, more, rounds, rest, slices):
    least = -(-pp // slices)
    breadth = least + more
    microbatches = breadth * rounds + (min(least + rest, breadth - 1) if rest and more else 0)
    sizes = {"pp": pp, "microbatches": microbatches, "breadth": breadth, "slices": slices}
    validate(build(name, **sizes, virtual_stages=3))


@pytest.mark.parametrize(("breadth", "microbatches"), [(3, 9), (5, 16)])
def test_groups_that_do_not_fill_the_ranks_are_refused(breadth, microbatches):
    message = f"breadth={breadth}"
    with pytest.raises(ScheduleError, match=message):
        build("interleaved_1f1b", pp=4, microbatches=microbatches, breadth=breadth)


@pytest.mark.parametrize("name", ORDERS)
@given(pp=st.integers(1, 9), microbatches=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_nearest_sizes_are_those_that_a_builder_takes(name, pp, microbatches):
    near_by = nearest_sizes(name, pp, microbatches)
    build(name, pp=near_by[0], microbatches=near_by[1])
    if (pp, microbatches) != near_by:
        with pytest.raises(ScheduleError):
            build(name, pp=pp, microbatches=microbatches)
