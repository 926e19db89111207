"""The tables, executed by a plain interpreter that checks every slot it reads."""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpret
from orders import build, has_option, min_microbatches, near

from jaxpipe.core.schedule import (
    ORDERS,
    Action,
    Lockstep,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    forward_only,
    lower,
    simulate,
    validate,
)
from jaxpipe.core.schedule.lifetimes import assign_slots

PAIRED = ("dualpipe", "dualpipev")  # an F together with a gradient of another chunk


@cache
def from_least(name, pp, more, chunks):
    """Return a schedule of about `more` microbatches more than the fewest on `pp` ranks."""
    return near(name, pp, min_microbatches(name, pp) + more - 1, chunks)


def writable(tables):
    """Return a copy of the tables, to plant a fault in."""
    return deepcopy(tables)


@pytest.mark.parametrize("name", ORDERS)
@given(
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 20),
    chunks=st.integers(1, 3),
    transfer_ticks=st.sampled_from([1, 2]),
    ends=st.sampled_from([{}, {"defer_embed_head": True}, {"vocab_parallel": True}]),
    pairs=st.booleans(),
    every=st.sampled_from([1, 1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_tables_bring_every_value_where_it_is_read(
    name, pp, microbatches, chunks, transfer_ticks, ends, pairs, every
):
    schedule = from_least(name, pp, microbatches, chunks)
    tables = lower(schedule, Lockstep(transfer_ticks, pairs=pairs, every=every, **ends))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}
    assert bool(tables.pairs) == (pairs and name in PAIRED)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
@given(
    pp=st.integers(2, 8),
    microbatches=st.integers(1, 20),
    ends=st.sampled_from([{}, {"defer_embed_head": True}, {"vocab_parallel": True}]),
    phases=st.integers(2, 3),
)
@settings(max_examples=20, deadline=None)
def test_every_value_travels_in_the_phase_of_its_ranks(name, pp, microbatches, ends, phases):
    schedule = from_least(name, pp, microbatches, 1)
    tables = lower(schedule, Lockstep(phases=phases, **ends))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}
    joined = [way for routes in tables.permute_pairs for ways in routes.values() for way in ways]
    assert len(joined) == len(set(joined)) == 2 * (pp - 1)
    for routes in tables.permute_pairs:
        senders = [sender for ways in routes.values() for sender, _ in ways]
        assert len(senders) == len(set(senders))  # no rank has two partners


def test_phases_are_for_ranks_of_one_stage():
    with pytest.raises(ScheduleError, match=r"phases=2: .* ranks of zbv have several stages"):
        lower(build("zbv", pp=2, microbatches=4), Lockstep(phases=2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 20),
    transfer_ticks=st.sampled_from([1, 2]),
    in_flight=st.integers(1, 20),
    vocab_parallel=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_cap_on_microbatches_is_kept(
    name, pp, microbatches, transfer_ticks, in_flight, vocab_parallel
):
    schedule = build(name, pp=pp, microbatches=microbatches)
    tables = lower(schedule, Lockstep(transfer_ticks, in_flight, vocab_parallel))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}
    assert tables.slots.for_w <= in_flight


@pytest.mark.parametrize("name", [name for name in ORDERS if name not in PAIRED])
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_slots_are_the_schedules_own_peak(name, transfer_ticks):
    """A buffer has as many slots as the order of actions needs, whatever their ticks."""
    schedule = near(name, 4, 12, 2)
    slots, report = lower(schedule, Lockstep(transfer_ticks)).slots, simulate(schedule)
    assert slots.for_b == max(report.peak_until_b)
    assert slots.for_w == max(report.peak_until_w)
    assert bool(slots.stash) == any(action.op is Op.W for _, action in schedule.actions())


@pytest.mark.parametrize("name", PAIRED)
def test_a_pair_of_cells_holds_both_at_once(name):
    """F takes a slot before the paired gradient frees its own: at most one more."""
    schedule = near(name, 4, 12, 2)
    slots, report = lower(schedule).slots, simulate(schedule)
    assert max(report.peak_until_w) <= slots.for_w <= max(report.peak_until_w) + 1


@pytest.mark.parametrize("transfer_ticks", [1, 2])
@pytest.mark.parametrize(
    "placement", [Placement.loop(4), Placement.loop(3, 2), Placement.v_shape(4),
                  Placement((0, 1, 2, 3), mirrored_from=3)],
    ids=["one stage", "two stages", "V", "both ways"],
)  # fmt: skip
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_forward_only_tables(placement, transfer_ticks, vocab_parallel):
    schedule = forward_only(placement, 6)
    tables = lower(schedule, Lockstep(transfer_ticks, vocab_parallel=vocab_parallel))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}
    assert not tables.has_gradients
    assert tables.slots.inbox <= transfer_ticks * placement.chunks + vocab_parallel
    assert not any(tables.slots[1:])


@pytest.mark.parametrize("fault", ["swapped slot", "late store", "dropped W", "other way", "chunk"])
def test_a_planted_fault_is_caught(fault):
    schedule = near("zbv", 4, 6)
    tables = writable(lower(schedule))
    columns = tables.columns
    if fault == "swapped slot":
        columns.for_b_read[columns.B > 0] ^= 1
    elif fault == "late store":
        columns.arrive[0][1:] = columns.arrive[0][:-1].copy()
    elif fault == "other way":
        columns.send[0][columns.send[0] > 0] ^= 3
    elif fault == "chunk":
        columns.F[columns.F > 0] ^= 3
    else:
        columns.W[columns.W[:, 1].argmax(), 1] = 0
    with pytest.raises((AssertionError, KeyError)):
        assert interpret(schedule, tables) == {action for _, action in schedule.actions()}


SLICED = [name for name in ORDERS if has_option(name, "slices")]


@pytest.mark.parametrize("name", SLICED)
@given(
    pp=st.integers(1, 6),
    rounds=st.integers(1, 3),
    slices=st.integers(2, 5),
    transfer_ticks=st.integers(1, 2),
    more=st.none() | st.integers(0, 6),
)
@settings(max_examples=30, deadline=None)
def test_slices_pass_in_order_and_return_in_reverse(name, pp, rounds, slices, transfer_ticks, more):
    schedule = build(name, pp=pp, microbatches=-(-pp // slices) * rounds, slices=slices)
    validate(schedule)
    most = max(simulate(schedule).peak_until_w)
    in_flight = None if more is None else most + more
    tables = lower(schedule, Lockstep(transfer_ticks, in_flight))
    assert interpret(schedule, tables) == {action for _, action in schedule.actions()}
    assert 1 <= tables.slots.dstate <= tables.slots.state
    forward = forward_only(schedule.placement, schedule.microbatches, slices)
    validate(forward)
    tables = lower(forward, Lockstep(transfer_ticks))
    assert interpret(forward, tables) == {action for _, action in forward.actions()}
    assert tables.slots.dstate == 0


def test_slices_of_few_sequences_are_held():
    """Seq1F1B: P - 1 + S slices are live, and the state of the sequences that they belong to."""
    slots = lower(build("1f1b", pp=4, microbatches=8, slices=4)).slots
    assert (slots.for_w, slots.state, slots.dstate) == (7, 3, 1)
    whole = lower(build("1f1b", pp=4, microbatches=8)).slots
    assert whole.for_w == 4
    assert not whole.state


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        (("F0@0", "F1@0"), "F1@0: it must follow F0@0"),
        (("BW1@0", "BW0@0"), "BW0@0: it must follow BW1@0"),
    ],
)
def test_slices_out_of_order_are_refused(swap, message):
    schedule = build("gpipe", pp=1, microbatches=2, slices=2)
    order = list(schedule.ranks[0])
    first, second = (next(i for i, c in enumerate(order) if str(c) == name) for name in swap)
    order[first], order[second] = order[second], order[first]
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, ranks=(tuple(order),)))


@pytest.mark.parametrize("fault", ["state", "state_read", "dstate", "first_slice", "last_slice"])
def test_a_planted_fault_of_slices_is_caught(fault):
    schedule = build("interleaved_zb", pp=2, microbatches=4, slices=2)
    tables = writable(lower(schedule))
    assert interpret(schedule, tables)
    columns = tables.columns
    used = columns.chunk_column(Op.F if fault in ("state", "first_slice") else Op.B) > 0
    if fault == "dstate":
        used &= columns.last_slice == 0
    getattr(columns, fault)[used] ^= 1
    with pytest.raises((AssertionError, KeyError)):
        interpret(schedule, tables)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=30))
def test_colouring_uses_the_fewest_slots(spans):
    intervals = {i: (start, start + length) for i, (start, length) in enumerate(spans)}
    slots = assign_slots(intervals.items())
    alive = [
        [slots[i] for i, (first, last) in intervals.items() if first <= tick <= last]
        for tick in range(40)
    ]
    assert all(len(set(now)) == len(now) for now in alive)
    assert 1 + max(slots.values()) == max(map(len, alive))


@pytest.mark.parametrize(
    ("name", "pp", "lanes"),
    [
        ("1f1b", 4, [(1, ("y",)), (-1, ("dx",))]),
        ("interleaved_zb", 2, [(1, ("y",)), (-1, ("dx",))]),
        ("zbv", 2, [(1, ("y",)), (-1, ("dx",))]),
        ("zbv", 4, [(1, ("y", "dx")), (-1, ("y", "dx"))]),
        ("dualpipe", 4, [(1, ("y",)), (1, ("dx",)), (-1, ("y",)), (-1, ("dx",))]),
        ("1f1b", 1, []),
    ],
)
def test_a_permute_carries_no_more_than_it_must(name, pp, lanes):
    assert list(lower(near(name, pp, 8, 2)).lanes) == lanes


@pytest.mark.parametrize(
    ("name", "pp", "up"),
    [
        ("1f1b", 4, [(0, 1), (1, 2), (2, 3)]),  # the last rank sends nothing to the first
        ("zbv", 4, [(0, 1), (1, 2), (2, 3)]),
        ("dualpipe", 2, [(0, 1), (1, 0)]),
        ("interleaved_1f1b", 3, [(0, 1), (1, 2), (2, 0)]),
    ],
)
def test_a_permute_joins_only_ranks_that_some_tick_sends_to(name, pp, up):
    (routes,) = lower(near(name, pp, 6, 2)).permute_pairs
    assert list(routes[1]) == up
    assert list(routes[-1]) == sorted((to, sender) for sender, to in up)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_ticks": 3}, "transfer_ticks=3"),
        ({"in_flight": 0}, "in_flight=0: a rank must hold at least 1"),
        ({"every": 2, "offset": 2}, "every=2, offset=2: the first must be at least 1"),
        (
            {"phases": 2, "transfer_ticks": 2},
            "phases=2, transfer_ticks=2: .* more only with",
        ),
        (
            {"vocab_parallel": True, "defer_embed_head": True},
            "nothing to even out .* use one of them",
        ),
    ],
)
def test_knobs_that_cannot_be(options, message):
    with pytest.raises(ScheduleError, match=message):
        Lockstep(**options)


def test_tables_are_made_once_and_cannot_be_written():
    schedule = build("dualpipe", pp=2, microbatches=4)
    tables = lower(schedule, Lockstep(vocab_parallel=True))
    same = build("dualpipe", pp=2, microbatches=4)
    assert lower(same, Lockstep(vocab_parallel=True)) is tables
    assert lower(same, Lockstep()) is not tables
    columns = tables.columns
    for column in (
        columns.W,
        columns.send[1],
        columns.vocab_parallel.dy_write,
        columns.vocab_parallel.head[0],
    ):
        with pytest.raises(ValueError, match="read-only"):
            column[0, 0] = 1


def test_rejects_a_message_across_the_ring():
    placement = Placement((0, 2, 1, 3))
    orders = [[Action(Op.F, stage, 0)] for stage in (0, 2, 1, 3)]
    schedule = Schedule.from_orders("skipping", placement, 1, orders)
    with pytest.raises(ScheduleError, match="stage 0, microbatch 0 goes from rank 0 to rank 2"):
        lower(schedule)


def test_a_cap_that_is_too_small_says_so():
    with pytest.raises(ScheduleError, match="no rank of bfs can go on with in_flight=1: raise it"):
        lower(build("bfs", pp=2, microbatches=4, virtual_stages=1), Lockstep(in_flight=1))


def test_sets_of_cells_have_one_order_in_every_process():
    """Whatever the seed of the hashes of names, and the addresses of objects."""
    program = (
        "from jaxpipe.core.schedule import zb_h1; orders = zb_h1(pp=3, microbatches=5).ranks; "
        "print(*{cell for order in orders for cell in order})"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1
    assert "BW" not in min(found)
    assert len(min(found).split()) == 3 * 5 * 3
