"""What a plan or a search recommends: in words to type, with the gain; progress on the way."""

import json
import re

import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.plan import main
from jaxpipe.planning.progress import PlanProgress

SIZES = ["parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=8", "parallel.transfer_ticks=1"]


def plan(capsys, *words):
    assert main([str(SMALL), *SIZES, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "more",
    [["parallel.schedule=gpipe"],
     ["parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2"],
     pytest.param(["parallel.schedule=zb_auto", "parallel.memory_limit=1p"],
                  marks=pytest.mark.extended)],
)  # fmt: skip
def test_the_printed_settings_run_the_fastest_schedule(capsys, more):
    assert main([str(SMALL), *SIZES, *more]) == 0
    said = capsys.readouterr().out
    found = re.search(
        r"([\d.]+)% more tokens/s than the configured .*\. To run it: (.*)$", said, re.M
    )
    gain, words = found.groups()
    before, after = plan(capsys, *more), plan(capsys, *more, *words.split())
    best, own = (
        next(row for row in made["schedules"] if row["configured"]) for made in (after, before)
    )
    assert best["schedule"] == before["best"]
    speed = next(r for r in before["schedules"] if r["schedule"] == before["best"])
    ratio = speed["tokens_per_second"] / own["tokens_per_second"]
    assert float(gain) == pytest.approx(100 * (ratio - 1), abs=0.06)


def test_the_configured_schedule_may_be_the_fastest(capsys):
    assert main([str(SMALL), *SIZES, "parallel.schedule=dualpipe"]) == 0
    assert "which the configuration names" in capsys.readouterr().out


def test_named_schedules_are_shown_beside_the_configured_one(capsys):
    rows = plan(capsys, "--schedules", "gpipe,zb_h1")["schedules"]
    names = [row["schedule"] for row in rows]
    assert {name.split()[0] for name in names} == {"1f1b", "gpipe", "zb_h1"}
    assert sum(row["configured"] for row in rows) == names.count("1f1b") == 1
    assert main([str(SMALL), *SIZES, "--schedules", "gpip"]) == 2
    assert "unknown schedule 'gpip': did you mean gpipe?" in capsys.readouterr().err


@pytest.mark.extended
def test_a_search_prints_the_gain_and_the_settings_of_the_fastest(capsys):
    fixed = ["parallel.pp=2", "parallel.tp=1", "train.microbatch_size=1", "train.remat=none"]
    words = [str(SMALL), *fixed, "--search", "--devices", "2"]
    assert main(words) == 0
    sentence, settings = capsys.readouterr().out.split("fastest: ")[1].split(". To run it: ")
    assert main([*words, "--json"]) == 0
    fastest = json.loads(capsys.readouterr().out)["best"][0]
    assert main([str(SMALL), *fixed, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    own = next(row for row in plan["schedules"] if row["configured"])["tokens_per_second"]
    devices = configs.load(SMALL, fixed).parallel.devices  # those of the search are 2
    ratio = fastest["tokens_per_second"] / 2 / (own / devices)
    assert float(sentence.partition("%")[0]) == pytest.approx(100 * (ratio - 1), abs=0.06)
    rate = "tokens/s per device" if devices > 2 else "tokens/s"
    assert sentence.endswith(f"% more {rate} than the configured pp=2 dp={devices // 2} tp=1 1f1b")
    best, settings = fastest["settings"], settings.splitlines()[0]  # what follows compares
    for word in settings.split():
        name, _, value = word.partition("=")
        section, key = name.split(".")
        assert str(best[section][key]).lower() == value.replace("''", "")


def test_progress_is_a_line_every_few_seconds(capsys, monkeypatch):
    now = iter([0.0, 3.0, 6.0, 8.0, 12.0])
    progress = PlanProgress(5.0, lambda: next(now))
    for number in range(4):
        progress(lambda number=number: f"{number} done")
    assert capsys.readouterr().err == "1 done\n3 done\n"
    monkeypatch.setattr(
        PlanProgress.__init__, "__defaults__", (0.0, PlanProgress.__init__.__defaults__[1])
    )
    assert main([str(SMALL), *SIZES]) == 0
    err = capsys.readouterr().err
    assert re.search(r"plan: \d+ of \d+ schedules, fastest so far .*, [\d,]+ tokens/s\n", err)


def test_the_title_of_a_picture_says_which_costs(tmp_path, capsys):
    path = tmp_path / "a.svg"
    assert main([str(SMALL), *SIZES, "--picture", str(path)]) == 0
    assert "costs estimated for H100" in path.read_text()
