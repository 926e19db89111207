"""What is made of measured steps: ratios within a round, what is asked of them, tables in files."""

from pathlib import Path

import pytest

from jaxpipe.bench import __main__ as bench
from jaxpipe.bench import show
from jaxpipe.bench.results import Peak, Result, Steps, table


def result():
    seconds = [
        {"jaxpipe single": 10.0, "jaxpipe 1f1b": 8.0},
        {"jaxpipe single": 20.0, "jaxpipe 1f1b": 10.0, "torch single": 3.0},
        {"jaxpipe 1f1b": 1.0, "torch Schedule1F1B": 1.0},
    ]
    steps = Steps(
        microbatches=2, rounds=seconds, predicted=[{"1f1b": 4.0}, {}, {}],
        tried={"jaxpipe single": 3, "jaxpipe 1f1b": 3}, losses={}, compile={"jaxpipe 1f1b": 1.5},
        memory={"jaxpipe 1f1b": Peak(2**21, 2**20)},
        busy=[
            {"jaxpipe single": 10.0, "jaxpipe 1f1b": 12.0},
            {"jaxpipe single": 20.0, "jaxpipe 1f1b": 15.0, "torch single": 3.0},
            {"jaxpipe 1f1b": 2.0, "torch Schedule1F1B": 1.5},
        ],
    )  # fmt: skip
    return Result("2026-01-01", "bench", {"jax": "1"}, "a machine", 100, [], [steps])


def test_ratios_are_within_a_round():
    steps = result().steps[0]
    assert steps.efficiency("jaxpipe", "1f1b") == [0.625, 1.0]
    assert steps.predicted_efficiency("1f1b") == [10 / 2 / 4]
    assert steps.promise_kept("1f1b") == [0.5]
    assert steps.bubble("jaxpipe 1f1b") == [0.25, 0.25, 0.0]
    assert steps.efficiency("torch", "Schedule1F1B") == []
    cells = "| 1f1b | 2 | 8.00 (1.00-10.00) | 25 | 0.812 (0.625-1.000) | 1.250 (1.250-1.250) |"
    assert cells in table(result())
    assert "its bubble" in table(result())
    (found := result()).steps[0].busy = []
    assert "bubble" not in table(found)  # nobody measured it


def test_the_readme_is_filled_from_the_kept_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(show, "RESULTS", tmp_path)
    result().write(tmp_path / "one.json")
    assert Result.read(tmp_path / "one.json") == result()
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results one -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    assert bench.main(["show", "--files", str(readme)]) == 0
    once = readme.read_text()
    assert "| 1f1b | 2 | 8.00 | 25 | 0.812 |" in once
    assert "old" not in once
    assert once.startswith("before\n") and once.endswith("after <!-- end -->\n")  # noqa: PT018
    assert show.filled(once) == once
    picture = (tmp_path / "one.svg").read_bytes()
    assert picture.startswith(b"<?xml")
    assert bench.main(["show", "--files", str(readme)]) == 0
    assert (tmp_path / "one.svg").read_bytes() == picture
    readme.write_text("<!-- results two -->\n<!-- end -->\n")
    assert bench.main(["show", "--files", str(readme)]) == 2
    assert "there is no two.json" in capsys.readouterr().err


@pytest.mark.parametrize("file", show.FILES, ids=str)
def test_the_files_show_the_results_that_are_kept(file):
    text = (Path(__file__).parents[2] / file).read_text()
    assert show.filled(text) == text
