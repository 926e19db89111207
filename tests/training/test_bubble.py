"""The bubble measured during a run, against the predicted one."""

import pytest
from commands import SMALL, metrics

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.planning import Devices, Hardware, analytic, arrange, estimate
from jaxpipe.run.measure import bubble
from jaxpipe.schedules.timing.recording import ProfileError

HOW = ["parallel.schedule=zb_h1", "parallel.pp=2", "parallel.dp=4", "train.eval_every=0"]
SHARED = "parallel.vocab_parallel_pp=true"  # adds a tick to the loop, not to the schedule


@pytest.mark.extended
def test_every_second_step_but_the_first_has_both_bubbles(tmp_path):
    steps = [SHARED, "train.steps=4", "log.bubble_every=2"]
    assert train.main([str(SMALL), f"run.dir={tmp_path / 'a'}", *HOW, *steps]) == 0
    lines = metrics(tmp_path / "a")
    measured = {step: line["bubble"] for step, line in lines.items() if "bubble" in line}
    assert sorted(measured) == [2, 4]
    assert all(0 < each < 1 for each in measured.values())
    config = configs.load(SMALL, [*HOW, SHARED])
    own = estimate(arrange(config, Devices("cpu")), analytic(config, Hardware()))
    assert lines[2]["bubble_predicted"] == own.report.bubble_scan
    every = [SHARED, "train.steps=2", "log.bubble_every=1"]
    assert train.main([str(SMALL), f"run.dir={tmp_path / 'b'}", *HOW, *every]) == 0
    again = metrics(tmp_path / "b")
    assert "bubble" not in again[1]
    assert [again[step]["loss"] for step in (1, 2)] == [lines[step]["loss"] for step in (1, 2)]


@pytest.mark.slow
def test_a_recording_without_ticks_is_said_once(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise ProfileError("the recording has no exchange.")

    monkeypatch.setattr(bubble, "ticks", none)
    steps = ["train.steps=4", "log.bubble_every=1"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *HOW, *steps]) == 0
    assert capsys.readouterr().out.count("log.bubble_every: the recording has no exchange.") == 1
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.slow
def test_steps_in_one_program_have_its_bubble(tmp_path):
    steps = ["train.fused_steps=2", "train.steps=5", "log.bubble_every=4", "checkpoint.every=0"]
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *HOW, *steps]) == 0
    lines = metrics(tmp_path)
    assert [step for step, line in lines.items() if "bubble" in line] == [3, 4]
    assert 0 < lines[3]["bubble"] == lines[4]["bubble"] < 1
    assert lines[3]["bubble_predicted"] == lines[4]["bubble_predicted"]
