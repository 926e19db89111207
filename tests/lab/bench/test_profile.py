"""A recorded step: ticks found between exchanges, bubbles, and the command on virtual devices."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe import profile
from jaxpipe.core.schedule import Lockstep, Op
from jaxpipe.core.schedule.placing import place
from jaxpipe.schedules import build
from jaxpipe.schedules.timing.recording import (
    Event,
    ProfileError,
    match_ticks,
    median_op_seconds,
    rank_bubbles,
)

SMALL = Path(__file__).parents[2] / "data" / "small.toml"


def recorded(ticks, work=2.0, exchange=1.0):
    """Return events of devices 7 and 5, which meet at two permutes and then work equally long."""
    events, now = [], 0.0
    for _ in range(ticks):
        middle, works = now + exchange / 2, now + exchange
        for device in (7, 5):
            events.append(Event(device, "ppermute.1", now, middle))
            events.append(Event(device, "ppermute.2", middle, works))
            events.append(Event(device, "fusion.4", works, works + work / 2))
            events.append(Event(device, "conditional.5", works + work / 4, works + work))
        now = works + work
    once = [("ppermute.9", -1.0, 0.0), ("fusion.8", now, now + 5)]  # outside the loop
    return events + [Event(device, *each) for device in (7, 5) for each in once]


def test_ticks_are_what_lies_between_exchanges():
    grid = place(build("1f1b", pp=2, microbatches=2))
    ranks = match_ticks(recorded(len(grid)), grid, {7: 0, 5: 1})
    assert [str(tick.cell) for tick in ranks[0]] == ["F0@0", "F1@0", "", "BW0@0", "", "BW1@0"]
    assert {
        (tick.compute_begin - tick.begin, tick.end - tick.compute_begin) for tick in ranks[1]
    } == {(1.0, 2.0)}
    assert rank_bubbles(ranks) == {rank: pytest.approx(1 - 4 * 2 / 18) for rank in (0, 1)}
    assert median_op_seconds(ranks) == {(op, s): 2.0 for op in (Op.F, Op.BW) for s in (0, 1)}


def test_ticks_of_turns_begin_with_a_permute_each():
    grid = place(build("1f1b", pp=3, microbatches=2), Lockstep(phases=2))
    events, names = [], {0.0: "ppermute.3", 1.0: "ppermute.4"}
    for event in recorded(len(grid)):
        if not event.name.startswith("ppermute.2"):
            name = names[event.begin / 3 % 2] if event.name == "ppermute.1" else event.name
            events.append(replace(event, name=name))
    ranks = match_ticks(events, grid, {7: 0, 5: 1}, phases=2)
    assert [str(tick.cell) for tick in ranks[0]][:4] == ["", "F0@0", "", "F1@0"]
    assert {tick.end - tick.begin for tick in ranks[1]} == {3.0}
    with pytest.raises(ProfileError, match="no exchange that runs once"):
        match_ticks(events, grid, {7: 0, 5: 1})


def test_a_recording_without_ticks_is_refused():
    grid = place(build("1f1b", pp=2, microbatches=2))
    with pytest.raises(ProfileError, match="no exchange that runs once in each of 6 ticks"):
        match_ticks(recorded(5), grid, {7: 0, 5: 1})
    with pytest.raises(ProfileError, match="lacks some of the devices"):
        match_ticks(recorded(6), grid, {7: 0, 5: 1, 3: 2})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_the_command_records_a_step(tmp_path, capsys, schedule):
    overrides = [f"parallel.schedule={schedule}", "parallel.pp=2", "train.grad_accum_steps=8"]
    assert profile.main([str(SMALL), *overrides, "parallel.dp=4", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "bubble" in said
    events = json.loads((tmp_path / "ticks.json").read_text())["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X" and event["name"] != "exchange"]
    names = [name for event in boxes for name in event["name"].split("+")]
    assert min(event["dur"] for event in boxes) > 0
    each = 2 if schedule == "dualpipe" else 4 if schedule == "zbv" else 2
    assert sum(name.startswith("F") for name in names) == 8 * each


def test_one_rank_is_refused(capsys):
    assert profile.main([str(SMALL), "parallel.pp=1", "parallel.dp=8"]) == 2
    assert "parallel.pp=1 has no ticks" in capsys.readouterr().err
