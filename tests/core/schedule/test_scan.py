"""The scan's clock against event simulation, and by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.scan import scan_time as by_events
from orders import build, near

from jaxpipe.core.schedule import (
    ORDERS,
    Costs,
    Lockstep,
    lower,
    simulate,
)
from jaxpipe.core.schedule.scan import optimize_pace, scan_starts, scan_time

PUBLISHED = Costs(1, 1.15, 0.85, transfer=0.05)


@pytest.mark.parametrize("name", ORDERS)
@given(
    pp=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    transfer_ticks=st.integers(1, 2),
    vocab_parallel=st.booleans(),
    meets=st.booleans(),
    times=st.tuples(*[st.floats(0.1, 4.0)] * 3, st.floats(0.0, 1.0)),
)
@settings(max_examples=12, deadline=None)
def test_the_clock_is_what_a_program_per_rank_does(
    name, pp, microbatches, transfer_ticks, vocab_parallel, meets, times
):
    schedule = near(name, pp, microbatches, 2)
    costs, lockstep = (
        Costs(*times),
        Lockstep(transfer_ticks, None, vocab_parallel, synchronizes_all=meets),
    )
    assert scan_time(schedule, costs, lockstep) == pytest.approx(
        by_events(schedule, costs, lockstep), rel=1e-12
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@given(
    pp=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    vocab_parallel=st.booleans(),
    phases=st.integers(2, 3),
    times=st.tuples(*[st.floats(0.1, 4.0)] * 3, st.floats(0.0, 1.0)),
)
@settings(max_examples=12, deadline=None)
def test_by_turns_the_clock_is_what_a_program_per_rank_does(
    name, pp, microbatches, vocab_parallel, phases, times
):
    schedule = near(name, pp, microbatches, 1)
    costs, lockstep = (
        Costs(*times),
        Lockstep(vocab_parallel=vocab_parallel, phases=phases),
    )
    assert scan_time(schedule, costs, lockstep) == pytest.approx(
        by_events(schedule, costs, lockstep), rel=1e-12
    )


def test_a_rank_waits_for_its_neighbours_alone():
    """A slow F of the first rank: the second waits for it, each later rank one tick later."""
    schedule = build("gpipe", pp=4, microbatches=1)
    costs = Costs(F=(5.0, 1.0, 1.0, 1.0), B=1.0, W=1.0, transfer=0.5)
    _, starts = scan_starts(schedule, costs)
    assert starts[:4].tolist() == [
        [0.0, 0.0, 0.0, 0.0],
        [5.5, 5.5, 0.5, 0.5],
        [7.0, 7.0, 7.0, 1.0],
        [7.5, 8.5, 8.5, 8.5],
    ]
    _, starts = scan_starts(schedule, costs, Lockstep(2))
    assert starts[:4].tolist() == [
        [0.0, 0.0, 0.0, 0.0],
        [5.0, 0.5, 0.5, 0.5],
        [5.5, 5.5, 1.0, 1.0],
        [6.0, 6.5, 6.0, 1.5],
    ]


# Given costs and two-tick transfers on 8 ranks with 32 microbatches: useful share of the time.
SHARES = {"1f1b": 0.651, "zb_h1": 0.883, "zb_h2": 0.912, "dualpipe": 0.904, "dualpipev": 0.878}


@pytest.mark.parametrize("name", SHARES)
def test_without_a_wrap_ranks_wait_less(name):
    report = simulate(build(name, pp=8, microbatches=32), PUBLISHED, Lockstep(2))
    assert 1 - report.bubble_scan == pytest.approx(SHARES[name], abs=0.001)


# The same with cells moved to ticks in which neighbours do not wait for each other.
PACED = {"1f1b": 0.694, "interleaved_1f1b": 0.895, "zb_h2": 0.921, "dualpipev": 0.886}


@pytest.mark.parametrize("name", PACED)
def test_idle_ticks_let_ranks_wait_less(name):
    schedule = build(name, pp=8, microbatches=32)
    lockstep = optimize_pace(schedule, PUBLISHED, Lockstep(2))
    assert lockstep.every > 1
    assert 1 - simulate(schedule, PUBLISHED, lockstep).bubble_scan >= PACED[name] - 0.001
    before, after = lower(schedule, Lockstep(2)), lower(schedule, lockstep)
    assert before.slots._replace(inbox=0) == after.slots._replace(inbox=0)
    assert before.permute_pairs == after.permute_pairs


@pytest.mark.parametrize(("pp", "share"), [(4, 0.817), (8, 0.795), (16, 0.784)])
def test_by_turns_1f1b_idles_hardly_more_than_ranks_that_are_free(pp, share):
    schedule = build("1f1b", pp=pp, microbatches=4 * pp)
    lockstep = optimize_pace(schedule, PUBLISHED, Lockstep(2), phased=True)
    assert (lockstep.transfer_ticks, lockstep.phases) == (1, 2)
    report = simulate(schedule, PUBLISHED, lockstep)
    assert 1 - report.bubble_scan == pytest.approx(share, abs=0.001)
    assert report.bubble_scan < report.bubble_global + 0.005
    assert lower(schedule, lockstep).slots.for_b == pp


def test_turns_are_taken_only_where_they_gain():
    for name in ("zb_h1", "dualpipe"):
        schedule = build(name, pp=4, microbatches=16)
        assert optimize_pace(schedule, PUBLISHED, Lockstep(2), phased=True).phases == 1


def test_nothing_is_paced_where_it_gains_nothing():
    schedule = build("gpipe", pp=4, microbatches=8)
    assert optimize_pace(schedule, Costs(), Lockstep(2)) == Lockstep(2)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_the_pace_is_that_of_the_shortest_scan(name, vocab_parallel):
    schedule, costs = near(name, 4, 16, 2), Costs(1, 1.15, 0.85, transfer=0.05)
    plain = Lockstep(2, vocab_parallel=vocab_parallel)
    paces = [replace(plain, every=e, offset=o) for e in (1, 2, 3) for o in range(e)]
    best = min(scan_time(schedule, costs, pace) for pace in paces)
    chosen = scan_time(schedule, costs, optimize_pace(schedule, costs, plain))
    assert best <= chosen <= best * (1 + 1e-3)
