"""Steps that overlap: their actions, how long they take, and the cases that are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import near
from oracles.scan import scan_time as by_events

from jaxpipe.core.schedule import (
    Action,
    Cell,
    Costs,
    Lockstep,
    MemoryCosts,
    Op,
    ScheduleError,
    lower,
    peak_memory,
    simulate,
    validate,
    write_schedule,
)
from jaxpipe.core.schedule.placing import place
from jaxpipe.core.schedule.scan import optimize_pace, scan_time
from jaxpipe.schedules import BUILDERS, FAMILIES, build, draw_timeline, fuse_steps, fusion_gain
from jaxpipe.schedules.timing.figure import draw_figure

ON_ONE_RANK = [name for name in BUILDERS if FAMILIES[name].placement != "both ways"]
ALIKE = Costs(1.0, 1.0, 1.0)


@pytest.mark.slow(only=["zb_h1", "zb_auto", "interleaved_zb", "zbv", "v_half", "v_min"])
@pytest.mark.parametrize("name", ON_ONE_RANK)
@given(
    pp=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    steps=st.integers(1, 3),
    lockstep=st.builds(
        Lockstep, st.integers(1, 2), st.sampled_from([None, 24]), synchronizes_all=st.booleans()
    ),
)
@settings(max_examples=8, deadline=None)
def test_steps_in_turn_are_valid_and_the_scan_keeps_them_so(
    name, pp, microbatches, steps, lockstep
):
    one = near(name, pp, microbatches, 2)
    several = fuse_steps(one, steps)
    validate(several)
    validate(replace(several, ranks=tuple(_busy(line) for line in zip(*place(several, lockstep)))))
    assert peak_memory(several, MemoryCosts()) == peak_memory(one, MemoryCosts())
    costs = Costs(1.0, 1.3, 0.8, transfer=0.1, U=0.7)
    assert scan_time(several, costs, lockstep) == pytest.approx(by_events(several, costs, lockstep))
    report = simulate(several, costs, lockstep)
    assert report.makespan <= steps * simulate(fuse_steps(one, 1), costs, lockstep).makespan + 1e-9


def _busy(line):
    return tuple(cell for cell in line if cell.actions)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("steps", [2, 4])
def test_what_a_parallelogram_gains(pp, steps):
    """In ZB-H2 the last rank starts and ends P - 1 forwards after the first."""
    m, update = 4 * pp, 0.5
    one, costs = build("zb_h2", pp=pp, microbatches=m), replace(ALIKE, U=update)
    wait, work = pp - 1, 3 * m
    assert simulate(one, costs).makespan == work + wait
    assert simulate(fuse_steps(one, steps), costs).makespan == steps * (work + update) + wait
    saved = 1 - (steps * work + wait) / (steps * (work + wait))
    assert fusion_gain(one, steps, ALIKE) == pytest.approx(saved, rel=1e-12)


def test_what_has_no_parallelogram_gains_nothing():
    one = build("zb_h1", pp=8, microbatches=32)
    assert fusion_gain(one, 4, ALIKE) == 0
    assert simulate(fuse_steps(one, 4)).makespan == 4 * simulate(one).makespan


def test_transfers_of_two_ticks_leave_little_of_it():
    one, costs = build("zb_h2", pp=8, microbatches=32), Costs(1, 1.15, 0.85, transfer=0.05)
    assert fusion_gain(one, 4, costs, Lockstep(1)) > 0.04
    ticks = optimize_pace(one, costs, Lockstep(2))
    assert ticks.every > 1
    assert 0 < fusion_gain(one, 4, costs, ticks) < 0.01


def test_an_update_stands_with_the_last_gradient_of_its_stage():
    several = fuse_steps(build("zbv", pp=2, microbatches=4, effort=20_000), 2)
    for order in several.ranks:
        for at, cell in enumerate(order):
            if cell.update:
                assert cell.gradient.stage == cell.update.stage
                before = (each.gradient for each in order[: at + 1])
                stage = [each for each in before if each and each.stage == cell.update.stage]
                whole = sum(each.op is Op.W for each in stage)
                assert whole == 4 * (1 + cell.update.microbatch // 4)
    assert sum(cell.update is not None for order in several.ranks for cell in order) == 2 * 4


def test_an_update_takes_its_time_and_is_drawn(tmp_path):
    forward, gradient = Action(Op.F, 0, 3), Action(Op.BW, 1, 1)
    both = Cell(forward, gradient, Action(Op.U, 1, 1))
    assert Costs(U=(0.0, 0.5)).cell_time(both) == 3.5
    assert Costs(pair=2.0, U=(0.0, 0.5)).cell_time(both) == 2.5
    path = tmp_path / "steps.svg"
    draw_figure(fuse_steps(build("zb_h2", pp=2, microbatches=3), 2), path, lockstep=Lockstep())
    assert "U (update)" in path.read_text()


def test_forwards_that_run_ahead_wait_for_the_update():
    several = fuse_steps(build("1f1b", pp=2, microbatches=3), 2)
    assert draw_timeline(several, Lockstep(in_flight=6)).splitlines() == [
        "rank 0 | F0 F1     F2+BW0 BW1       BW2+U2 F3 F4     F5+BW3 BW4       BW5+U5",
        "rank 1 | .  F0+BW0 F1+BW1 F2+BW2+U2 .      .  F3+BW3 F4+BW4 F5+BW5+U5 .",
    ]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: replace(s, updates=0), "rank 0, F2@0: it is of step 0"),
        (lambda s: replace(s, updates=3), "4 microbatches are not 3 steps"),
        (lambda s: replace(s, ranks=(s.ranks[0], _never(s.ranks[1]))), "stage 1 has 1 updates"),
        (lambda s: replace(s, ranks=(_swapped(s.ranks[0]), s.ranks[1])), "F2@0: it is of step 1"),
    ],
)
def test_validate_names_what_breaks_the_steps(edit, message):
    several = fuse_steps(build("1f1b", pp=2, microbatches=2), 2)
    with pytest.raises(ScheduleError, match=message):
        validate(edit(several))


def _never(order):
    """Remove the update at the end."""
    return (*order[:-1], order[-1]._replace(update=None))


def _swapped(order):
    """Move the first forward after an update in front of it."""
    at = next(at for at, cell in enumerate(order) if cell.update)
    return (*order[:at], order[at + 1], order[at], *order[at + 2 :])


def test_what_is_refused(tmp_path):
    one = build("zb_h1", pp=2, microbatches=2)
    with pytest.raises(ScheduleError, match="steps=0 must be at least 1"):
        fuse_steps(one, 0)
    with pytest.raises(ScheduleError, match="dualpipe has every stage on two ranks"):
        fuse_steps(build("dualpipe", pp=2, microbatches=4), 2)
    with pytest.raises(ScheduleError, match="the notation of files has no updates"):
        write_schedule(fuse_steps(one, 2), tmp_path / "orders.csv")


@pytest.mark.parametrize("name", ["zb_h2", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("lockstep", [Lockstep(), Lockstep(2), Lockstep(in_flight=24)])
def test_tables_say_where_ranks_end_and_begin_steps(name, lockstep):
    """A rank ends a step in the tick of its last gradient, and starts the next in the next tick.

    The tables also mark the first gradient of the embedding in a step; and, between the last end of
    a step and the first of the next, one tick in which all ranks validate it.
    """
    one, steps, m = near(name, 2, 6), 3, 6
    columns = lower(fuse_steps(one, steps), lockstep).columns
    works = columns.B + columns.W + columns.BW > 0
    for rank in range(one.pp):
        number = columns.gradient_mb[:, rank] // m
        ticks = [np.flatnonzero(works[:, rank] & (number == step)) for step in range(steps)]
        last = [each.max() for each in ticks]
        assert all(each.min() > before for before, each in zip(last, ticks[1:]))
        forwards = np.flatnonzero(columns.F[:, rank])
        assert all(
            (last[step - 1] if step else -1) < tick <= last[step]
            for tick, step in zip(forwards, columns.forward_mb[forwards, rank] // m)
        )
        ends, begins, embeds, validated = (np.flatnonzero(each[:, rank]) for each in columns.steps)
        assert ends.tolist() == last
        assert begins.tolist() == [tick + 1 for tick in last if tick + 1 < len(works)]
        embedded = np.flatnonzero(columns.embed_gradient[:, rank])
        assert len(embedded) == (rank == one.placement.rank_of[0]) * steps * m
        assert embeds.tolist() == embedded[::m].tolist()
        assert len(validated) == steps
        assert (validated >= ends).all()
        assert (validated[:-1] < ends[1:]).all()
    assert lower(one, lockstep).columns.steps is None


def test_they_take_no_more_slots_and_fewer_ticks():
    one = build("zb_h2", pp=4, microbatches=8)
    tables = lower(fuse_steps(one, 3))
    assert tables.slots == lower(one).slots
    assert tables.ticks < 3 * lower(one).ticks
