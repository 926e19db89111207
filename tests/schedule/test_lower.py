"""The tables, executed by a plain interpreter that checks every slot it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import Placement, ScheduleError, build, forward_only, lower
from jaxpipe.schedule.lower import colour


def interpret(tables, pp, microbatches):
    """Run the tables with symbols for values; fail where a slot holds anything but what is due.

    Returns the symbols of the losses and input gradients made, and the most slots each rank held.
    """
    column = {name: values.tolist() for name, values in tables.columns.items()}
    x = [[None] * (tables.x_slots + 1) for _ in range(pp)]
    dy = [[None] * (tables.dy_slots + 1) for _ in range(pp)]
    kept = [[None] * (tables.residual_slots + 1) for _ in range(pp)]
    y_out, dx_out, arriving = [None] * pp, [None] * pp, [(None, None)] * pp
    losses, gradients = set(), set()
    for tick in range(tables.ticks):
        at = {name: values[tick] for name, values in column.items()}
        sent = [(y_out[(r - 1) % pp], dx_out[(r + 1) % pp]) for r in range(pp)]
        arrived, arriving = (sent, None) if tables.transfer_ticks == 1 else (arriving, sent)
        y_out, dx_out = [None] * pp, [None] * pp
        for r in range(pp):
            x[r][at["x_arrive"][r]], dy[r][at["dy_arrive"][r]] = arrived[r]
            if at["forward"][r]:
                m = at["forward_mb"][r]
                assert at["embed"][r] == (r == 0)
                if r:
                    assert x[r][at["x_read"][r]] == ("y", r - 1, m)
                y_out[r] = ("y", r, m)
                kept[r][at["residual_write"][r]] = ("residual", r, m)
            if at["head"][r]:
                assert r == pp - 1
                losses.add(at["forward_mb"][r])
                dy[r][at["dy_write"][r]] = ("dx", pp, at["forward_mb"][r])
            if at["gradient"][r]:
                m = at["gradient_mb"][r]
                assert kept[r][at["residual_read"][r]] == ("residual", r, m)
                assert dy[r][at["dy_read"][r]] == ("dx", r + 1, m)
                assert at["embed_gradient"][r] == (r == 0)
                dx_out[r] = ("dx", r, m)
                gradients.add((r, m))
    assert losses == set(range(microbatches))
    return gradients


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(
    pp=st.integers(1, 10),
    microbatches=st.integers(1, 24),
    transfer_ticks=st.sampled_from([1, 2]),
    in_flight=st.one_of(st.none(), st.integers(1, 24)),
)
@settings(max_examples=120, deadline=None)
def test_tables_bring_every_value_where_it_is_read(
    name, pp, microbatches, transfer_ticks, in_flight
):
    schedule = build(name, pp=pp, microbatches=microbatches)
    tables = lower(schedule, transfer_ticks=transfer_ticks, in_flight=in_flight)
    gradients = interpret(tables, pp, microbatches)
    assert gradients == {(r, m) for r in range(pp) for m in range(microbatches)}
    if in_flight is not None:
        assert tables.residual_slots <= in_flight


@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_forward_only_tables(transfer_ticks):
    tables = lower(forward_only(Placement.loop(4), 6), transfer_ticks=transfer_ticks)
    assert interpret(tables, 4, 6) == set()
    assert not tables.trains
    assert (tables.dy_slots, tables.residual_slots) == (0, 0)


@pytest.mark.parametrize("fault", ["swapped slot", "late store", "dropped gradient"])
def test_a_planted_fault_is_caught(fault):
    tables = lower(build("1f1b", pp=4, microbatches=6))
    columns = tables.columns
    if fault == "swapped slot":
        columns["residual_read"][columns["gradient"] == 1] ^= 1
    elif fault == "late store":
        columns["x_arrive"][1:] = columns["x_arrive"][:-1].copy()
    else:
        tick = columns["gradient"][:, 1].argmax()
        columns["gradient"][tick, 1] = 0
    with pytest.raises(AssertionError):
        assert interpret(tables, 4, 6) == {(r, m) for r in range(4) for m in range(6)}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=30))
def test_colouring_uses_the_fewest_slots(spans):
    intervals = {i: (start, start + length) for i, (start, length) in enumerate(spans)}
    slots = colour(intervals.items())
    alive = [
        [slots[i] for i, (first, last) in intervals.items() if first <= tick <= last]
        for tick in range(40)
    ]
    assert all(len(set(now)) == len(now) for now in alive)
    assert 1 + max(slots.values()) == max(map(len, alive))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_ticks": 3}, "transfer_ticks=3"),
        ({"in_flight": 0}, "in_flight=0: a rank must hold at least 1"),
    ],
)
def test_rejects(options, message):
    with pytest.raises(ScheduleError, match=message):
        lower(build("1f1b", pp=2, microbatches=2), **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("interleaved_1f1b", "has 8 stages on 4 ranks: the executor runs one stage a rank"),
        ("zb_h1", "rank 0, 0I0: the executor runs the unsplit gradient"),
        ("dualpipe", "dualpipe runs both ways round the ranks"),
    ],
)
def test_says_what_the_executor_cannot_run(name, message):
    with pytest.raises(ScheduleError, match=message):
        lower(build(name, pp=4, microbatches=8))


def test_a_cap_that_is_too_small_says_so():
    with pytest.raises(ScheduleError, match="no rank of bfs can go on with in_flight=1: raise it"):
        lower(build("bfs", pp=2, microbatches=4, virtual_stages=1), in_flight=1)
