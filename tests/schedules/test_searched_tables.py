"""Tables of searched schedules, executed by the interpreter, and timed by events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpret
from legal import SEARCHED, near
from oracles.scan import scan_time as by_events

from jaxpipe.core.schedule import Costs, Lockstep, Op, lower, simulate
from jaxpipe.core.schedule.scan import scan_time


@pytest.mark.extended(only=["zbv", "zb_auto"])
@pytest.mark.slow(only=["v_half", "v_min"])
@pytest.mark.parametrize("name", SEARCHED)
@given(
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 6),
    transfer_ticks=st.sampled_from([1, 2]),
    ends=st.sampled_from([{}, {"defer_embed_head": True}, {"vocab_parallel": True}]),
    every=st.sampled_from([1, 1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_tables_bring_every_value_where_it_is_read(
    name, pp, microbatches, transfer_ticks, ends, every
):
    schedule = near(name, pp, microbatches)
    tables = lower(schedule, Lockstep(transfer_ticks, every=every, **ends))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_slots_are_the_schedules_own_peak(name, transfer_ticks):
    schedule = near(name, 4, 12)
    slots, report = lower(schedule, Lockstep(transfer_ticks)).slots, simulate(schedule)
    assert slots.for_b == max(report.peak_until_b)
    assert slots.for_w == max(report.peak_until_w)
    assert bool(slots.stash) == any(action.op is Op.W for _, action in schedule.actions())


@pytest.mark.slow(only=["v_half", "v_min"])
@pytest.mark.parametrize("name", SEARCHED)
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
    schedule, costs = near(name, pp, microbatches), Costs(*times)
    lockstep = Lockstep(transfer_ticks, None, vocab_parallel, synchronizes_all=meets)
    expected = pytest.approx(by_events(schedule, costs, lockstep), rel=1e-12)
    assert scan_time(schedule, costs, lockstep) == expected
