"""`python -m jaxpipe.train --report RUN_DIR`: the page of a run from its metrics.jsonl."""

import json

import pytest
from browser import colours_of, embedded, opened, references

from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.run.watch.report import write_report

STEPS = [
    {"step": 1, "loss": 5.5, "tokens_per_second": 100.0, "grad_norm": 2.0},
    {"step": 2, "loss": None, "tokens_per_second": 200.0, "data_idle_seconds": [0.0, 0.25]},
    {"step": 3, "loss": 5.0, "eval_loss": 5.1, "rank_lost_seconds": [0.5, None]},
]


def run_of(directory, records, rest=""):
    (directory / "config.toml").touch()
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records) + rest)
    return directory


def panels(directory):
    return {
        panel["title"]: {each["label"]: each["points"] for each in panel["series"]}
        for panel in embedded(directory / "report.html")["panels"]
    }


def test_every_number_of_the_log_is_in_the_page(tmp_path, capsys):
    run_of(tmp_path, STEPS, rest='{"step": 4, "lo')  # a line that is being written
    with pytest.raises(SystemExit) as ended:
        train.main(["--report", str(tmp_path)])
    assert ended.value.code == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out == f"wrote {path}: open it in a browser\n"
    assert not references(path)
    assert panels(tmp_path) == {
        "loss": {"loss": [[1, 5.5], [3, 5.0]], "eval_loss": [[3, 5.1]]},
        "gradient norm": {"grad_norm": [[1, 2.0]]},
        "tokens/s": {"tokens_per_second": [[1, 100.0], [2, 200.0]]},
        "devices wait for their data loader [s]": {
            "process 0": [[2, 0.0]], "process 1": [[2, 0.25]],
        },
        "time that ops and links of each rank cost a step [s]": {"rank 0": [[3, 0.5]]},
    }  # fmt: skip


def test_the_page_has_the_state_of_the_run_its_configuration_and_its_learning_rate(tmp_path):
    step = {"loss": 5.5, "lr": 0.25, "step_seconds": 30.5}
    run_of(tmp_path, [{"step": n, **step, "tokens_seen": 700 * n} for n in (1, 2)])
    settings = '[train]\nsteps = 3\n[run]\ndir = "/runs/first"\n[data]\npath = "http://{}host/x"\n'
    (tmp_path / "config.toml").write_text(settings.format("me:word@"))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    write_report(tmp_path)
    assert panels(tmp_path)["learning rate"] == {"lr": [[1, 0.25], [2, 0.25]]}
    page = embedded(tmp_path / "report.html")
    assert page["summary"] == [
        f"run first, in {tmp_path}",
        "step 2: loss 5.5000, 30.500 s a step, 1,400 tokens so far, 3 steps in all: about 0:00:30 "
        "to go",
        f"checkpoints: 1; the newest is {tmp_path / 'checkpoints' / '1'}",
        "the logged steps took 0:01:01 in all",
    ]
    assert page["config"] == settings.format("***@")
    assert "<title>run first</title>" in (tmp_path / "report.html").read_text()


def test_a_long_run_keeps_its_spikes(tmp_path):
    losses = [2.0 + 7.0 * (step == 7003) - (step == 9001) for step in range(1, 10_001)]
    run_of(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    write_report(tmp_path)
    points = panels(tmp_path)["loss"]["loss"]
    assert len(points) == 4000
    assert points == sorted(points)
    assert [7003, 9.0] in points
    assert [9001, 1.0] in points


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no directory of a run"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("records", [STEPS, []], ids=["steps", "none"])
def test_a_browser_shows_it(tmp_path, records):
    run_of(tmp_path, records)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 3\n")
    write_report(tmp_path)
    with opened(tmp_path / "report.html") as page:
        page.wait_for_timeout(100)
        settings = page.get_by_text("steps = 3")
        assert not settings.is_visible()
        page.get_by_text("configuration").click()
        assert settings.is_visible()
        page.get_by_text("configuration").click()
        assert page.locator("canvas").count() == (5 if records else 0)
        if not records:
            assert page.get_by_text("no step is logged").is_visible()
            return
        assert colours_of(page, "canvas") > 3
        box = page.locator("canvas").first.bounding_box()
        page.mouse.move(box["x"] + page.evaluate("charts[0].x(3)"), box["y"] + 50)
        assert page.locator("#tip").inner_text() == "loss: 5 at step 3\neval_loss: 5.1 at step 3"
