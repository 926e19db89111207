"""The page of a plan: its numbers are the plan's, nothing is loaded, and a browser shows it."""

import json
from pathlib import Path

import pytest
from browser import colours_of, embedded, opened, references

from jaxpipe import config as configs
from jaxpipe.core.schedule import peak_memory
from jaxpipe.plan import main
from jaxpipe.planning import Hardware, analytic, estimates
from jaxpipe.planning.limits import stage_memory
from jaxpipe.planning.page import write_page

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SIZES = ["parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=4", "parallel.transfer_ticks=1"]


@pytest.fixture
def written(tmp_path, capsys):
    """The page of a small plan, and the plan as `--json` prints it."""
    path = tmp_path / "plan.html"
    assert main([str(SMALL), *SIZES, "--json", "--html", str(path)]) == 0
    return path, json.loads(capsys.readouterr().out)


def estimated():
    config = configs.load(SMALL, SIZES)
    return estimates(config, analytic(config, Hardware()))[0]


@pytest.mark.extended
def test_the_page_has_the_numbers_of_the_plan(written):
    path, plan = written
    data = embedded(path)
    assert not references(path)
    assert data["plan"] == plan
    assert data["shown"] == plan["best"]
    columns = {column["name"]: column for column in data["columns"]}
    speeds = [row["tokens_per_second_per_gpu"] for row in plan["schedules"]]
    assert columns["tokens/s/GPU"]["values"] == speeds
    assert columns["tokens/s/GPU"]["texts"] == [f"{speed:,.0f}" for speed in speeds]
    assert "saved" not in columns  # no schedule has a value


@pytest.mark.extended
def test_timelines_are_those_of_the_simulator(written):
    path, plan = written
    data = embedded(path)
    ops = [op["name"] for op in data["ops"]]
    found = {one.label: one.plan.schedule for one in estimated()}
    assert len(data["timelines"]) == len(plan["schedules"])
    for row, timeline in zip(plan["schedules"], data["timelines"]):
        cells = [cell for rank in timeline["ranks"] for cell in rank]
        last = max(end for _, end, *_ in cells) * timeline["unit"]
        assert last == pytest.approx(row["scan_makespan"], rel=1e-12, abs=0)
        drawn = sorted(
            (rank, ops[cell[i]], *cell[i + 1 : i + 3])
            for rank, order in enumerate(timeline["ranks"])
            for cell in order
            for i in range(2, len(cell), 3)
        )
        actions = found[row["schedule"]].actions()
        assert drawn == sorted((rank, a.op.name, a.stage, a.microbatch) for rank, a in actions)


def test_text_cannot_end_the_data(tmp_path):
    data = {"text": "</script><b>"}
    write_page(tmp_path / "a.html", "a<b>&", "jaxpipe.planning", "plan.js", data)
    assert embedded(tmp_path / "a.html") == data
    assert "<title>a&lt;b&gt;&amp;</title>" in (tmp_path / "a.html").read_text()


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "missing" / "plan.html"
    assert main([str(SMALL), *SIZES, "--html", str(path)]) == 2
    assert f"{path} cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_browser_sorts_draws_and_explains(written):
    path, plan = written
    with opened(path, color_scheme="dark") as page:
        names = page.locator("table").first.locator("tbody tr td:first-child")
        speeds = {row["schedule"]: row["tokens_per_second"] for row in plan["schedules"]}
        own, *shown = names.all_inner_texts()
        assert own == "1f1b *"
        del speeds["1f1b"]
        assert [speeds[name] for name in shown] == sorted(speeds.values(), reverse=True)
        page.get_by_role("button", name="schedule").click()
        assert names.first.inner_text() == "1f1b *"

        names.filter(has_text="zbv").click()
        chosen = page.locator("tr[aria-selected=true] td:first-child")
        assert chosen.inner_text() == "zbv"
        page.keyboard.press("ArrowUp")
        assert chosen.inner_text() == "zb_h2"
        page.wait_for_timeout(100)
        assert colours_of(page, "canvas") > 5  # three ops, the track, text

        box = page.locator("canvas").first.bounding_box()
        at = page.evaluate("ranks.x((current.rows[1][0].start + current.rows[1][0].end) / 2)")
        page.mouse.move(box["x"] + at, box["y"] + box["height"] * 0.75)
        tip = page.locator("#tip")
        assert tip.inner_text().startswith("F0@1: F (forward) of microbatch 0 in stage 1, rank 1")
        assert "reads from rank 0, sent by F0@0" in tip.inner_text()
        assert page.evaluate("hovered.microbatch") == 0
        page.mouse.move(1, 1)
        assert not tip.is_visible()

        page.keyboard.press("+")
        assert page.evaluate("current.end / (view.to - view.from)") == pytest.approx(1.5)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(20, 23, 27)"


@pytest.mark.slow
def test_memory_in_the_browser_is_the_simulators(written):
    """The peak of every rank, and one message where an action's result is read elsewhere."""
    with opened(written[0]) as page:
        for row, one in enumerate(estimated()):
            page.evaluate(f"select({row})")
            memory = stage_memory(one.plan.config, one.plan.layout)
            peaks = peak_memory(one.plan.schedule, memory, one.plan.lockstep)
            assert page.evaluate("current.curves.map(peakOf)") == peaks, one.label
            assert page.evaluate("current.curves.every((of) => of.at(-1)[1] === 0)")
            schedule, rank = one.plan.schedule, one.plan.schedule.placement.rank
            links = [(s, m) for s in range(schedule.stages - 1) for m in range(4)]
            both_ways = 2 * sum(rank(s, m) != rank(s + 1, m) for s, m in links)
            assert page.evaluate("current.messages.length") == both_ways, one.label
