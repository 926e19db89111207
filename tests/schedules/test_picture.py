"""Pictures of timelines: boxes against the clocks, memory against the peaks, and the files."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import near

from jaxpipe.core.schedule import (
    Action,
    Costs,
    Lockstep,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    forward_only,
    simulate,
)
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.schedules import BUILDERS, build, draw_timeline
from jaxpipe.schedules.timing.figure import Box, build_tracks, draw_figure, timed_boxes

CLOCKS = [None, Lockstep(1), Lockstep(2), Lockstep(1, 20), Lockstep(2, 20)]
UNEVEN = Costs(F=0.9, B=1.3, W=0.7, transfer=0.2, pair=2.4)


def test_the_1f1b_figure_of_four_stages_and_eight_microbatches():
    """PipeDream-2BW/flush, Fig. 2: the last rank alternates without a pause."""
    last_rank = draw_timeline(build("1f1b", pp=4, microbatches=8)).splitlines()[3]
    assert last_rank.split("| ")[1].split()[3:] == [
        "F0", "BW0", "F1", "BW1", "F2", "BW2", "F3", "BW3", "F4", "BW4", "F5", "BW5", "F6", "BW6",
        "F7", "BW7", ".", ".", ".",
    ]  # fmt: skip


def small(name, pp=4, microbatches=8):
    return near(name, pp, microbatches)


def svg_of(schedule, folder, **options):
    draw_figure(schedule, folder / "a.svg", **options)
    return (folder / "a.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("lockstep", CLOCKS, ids=str)
@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["default", "uneven"])
def test_boxes_and_idle_cover_the_time(name, lockstep, costs):
    schedule = small(name)
    report = simulate(schedule, costs, lockstep or Lockstep())
    span = report.scan_makespan if lockstep else report.makespan
    rows = build_tracks(timed_boxes(schedule, costs, lockstep))
    for order, row in zip(schedule.ranks, rows):
        pieces = sorted([*((box.start, box.end) for box in row.boxes), *row.idle])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == pytest.approx(span)
        assert all(end == start for (_, end), (start, _) in pairwise(pieces))
        assert all(b.end - b.start == pytest.approx(costs.cell_time(b.cell)) for b in row.boxes)
        drawn = [action for box in row.boxes for action in box.cell.actions]
        assert sorted(map(str, drawn)) == sorted(str(a) for cell in order for a in cell.actions)


@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 12)),
    name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2"]),
    times=st.tuples(*[st.floats(0.1, 4.0)] * 3),
    ticks=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_a_picture_of_the_scan_ends_with_its_time(size, name, times, ticks):
    schedule, costs = build(name, pp=size[0], microbatches=size[1]), Costs(*times)
    lines = timed_boxes(schedule, costs, Lockstep(ticks))
    last = max(box.end for line in lines for box in line)
    assert last == pytest.approx(scan_time(schedule, costs, Lockstep(ticks)))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("lockstep", CLOCKS[:3], ids=str)
def test_memory_peaks(name, lockstep):
    schedule = small(name)
    report = simulate(schedule)
    lines = timed_boxes(schedule, Costs(), lockstep)
    peaks = [max(amount for _, amount in row.memory) for row in build_tracks(lines)]
    assert tuple(peaks) == report.peak_until_w
    peaks = [max(amount for _, amount in row.memory) for row in build_tracks(lines, (1.0, 0.0))]
    assert tuple(peaks) == report.peak_until_b
    for row in build_tracks(lines, (3.0, 0.5)):
        times, amounts = zip(*row.memory)
        assert all(early < late for early, late in pairwise(times))
        assert amounts[-1] == 0


def test_memory_and_phases_by_hand():
    schedule = build("zb_h1", pp=2, microbatches=2)
    lines = timed_boxes(schedule, Costs())
    first, second = build_tracks(lines, (3.0, 1.0))
    assert [str(box.cell) for box in second.boxes] == [
        "F0@1",
        "B0@1",
        "F1@1",
        "B1@1",
        "W0@1",
        "W1@1",
    ]
    assert second.idle == [(0.0, 1.0)]
    assert second.phases == (0.0, 2.0, 4.0, 7.0)
    assert second.memory == [(0.0, 0.0), (1.0, 3.0), (3.0, 4.0), (5.0, 2.0), (6.0, 1.0), (7.0, 0.0)]
    assert first.idle == [(2.0, 3.0)]
    assert first.phases == (0.0, 3.0, 3.0, 7.0)  # its last F ends before its first B starts


def test_an_overlapped_pair_frees_at_its_end():
    cell = small("dualpipe").ranks[0][7]
    assert len(cell.actions) == 2
    row = build_tracks([[Box(0.0, 3.0, cell)]])[0]
    assert row.memory == [(0.0, 1.0), (3.0, 0.0)]


@pytest.mark.slow(
    unless=[
        ".svg-<?xml-1f1b-4",
        ".PDF-%PDF-1f1b-4",
        ".png-\\x89PNG-1f1b-4",
        ".html-<!DOCTYPE html>-1f1b-4",
    ]
)
@pytest.mark.parametrize(("name", "pp"), [("1f1b", 4), ("dualpipe", 4), ("dualpipev", 2)])
@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".svg", b"<?xml"), (".PDF", b"%PDF"), (".png", b"\x89PNG"), (".html", b"<!DOCTYPE html>")],
)
def test_files_are_the_same_every_time(tmp_path, name, pp, suffix, start):
    schedule = small(name, pp)
    files = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for file in files:
        draw_figure(schedule, file)
    assert files[0].read_bytes().startswith(start)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_page_stands_alone(tmp_path):
    schedule = replace(small("1f1b"), name="a<b>")
    draw_figure(schedule, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<title>a&lt;b&gt; · P = 4, M = 8 · bubble 27.3%</title>" in page
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<?xml" not in page
    assert not re.search(r'(href|src)="http', page)


@pytest.mark.parametrize(
    ("name", "options", "bubble"),
    [
        ("1f1b", {}, "1f1b · P = 4, M = 8 · bubble 27.3%<"),
        ("1f1b", {"lockstep": Lockstep()}, "1f1b · lockstep · P = 4, M = 8 · bubble 40.0%<"),
        ("zb_h2", {}, "zb_h2 · P = 4, M = 8 · bubble 11.1% (0.0% of the longest rank's span)<"),
    ],
)
def test_title_has_the_bubble_of_the_clock(tmp_path, name, options, bubble):
    assert f"<dc:title>{bubble}" in svg_of(small(name), tmp_path, **options)


def test_numbers_are_drawn_where_they_fit(tmp_path):
    """Every action is labelled while the labels fit; few are when they do not."""

    def texts(microbatches):
        return svg_of(small("1f1b", microbatches=microbatches), tmp_path).count('<g id="text_')

    assert texts(12) - texts(8) >= 2 * 4 * 4
    assert texts(300) < texts(8)


def test_clock_options_reach_the_grid(tmp_path):
    schedule = small("1f1b")
    one = svg_of(schedule, tmp_path, lockstep=Lockstep())
    ahead = svg_of(schedule, tmp_path, lockstep=Lockstep(in_flight=7))
    two = svg_of(schedule, tmp_path, lockstep=Lockstep(transfer_ticks=2))
    assert len({one, ahead, two}) == 3


@pytest.mark.parametrize(
    "schedule",
    [
        build("gpipe", pp=1, microbatches=1),
        forward_only(Placement.loop(2), 3),
        build("interleaved_zb", pp=2, microbatches=4, virtual_stages=3),
    ],
    ids=lambda schedule: schedule.name,
)
def test_corners(tmp_path, schedule):
    assert "<svg" in svg_of(schedule, tmp_path, costs=UNEVEN, memory=(0.75, 0.25), unit="GiB")


@pytest.mark.extended
def test_large_schedules_stay_small(tmp_path):
    schedule = build("zb_h1", pp=32, microbatches=256)
    begin = time.process_time()
    draw_figure(schedule, tmp_path / "a.pdf")
    assert time.process_time() - begin < 20  # of CPU time, however busy the machine is
    assert (tmp_path / "a.pdf").stat().st_size < 2e6


@pytest.mark.parametrize("path", ["a.gif", "a", "a.svg.gz"])
def test_unknown_suffix(tmp_path, path):
    with pytest.raises(ScheduleError, match=".svg, .pdf, .png, .html"):
        draw_figure(small("1f1b"), tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_errors(tmp_path):
    stuck = Schedule.from_orders(
        "stuck", Placement.loop(1), 1, [[Action(Op.BW, 0, 0), Action(Op.F, 0, 0)]]
    )
    for lockstep in (None, Lockstep()):
        with pytest.raises(ScheduleError, match="deadlock"):
            draw_figure(stuck, tmp_path / "a.svg", lockstep=lockstep)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ScheduleError, match=r"pip install 'jaxpipe\[pictures\]'"):
        draw_figure(small("1f1b"), tmp_path / "a.svg")


def test_matplotlib_waits_until_a_picture_is_drawn(tmp_path):
    code = """
import sys
from jaxpipe.schedules import build
from jaxpipe.schedules.timing.figure import draw_figure
assert "matplotlib" not in sys.modules
draw_figure(build("1f1b", pp=2, microbatches=2), sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
import matplotlib
assert matplotlib.rcParams["svg.hashsalt"] is None
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "a.svg"], check=True)
