"""The window of a run that is profiled: only its steps, without an additional step."""

import contextlib
from collections import Counter

import pytest
from commands import SMALL, complete, metrics
from test_loop import Recorder

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.measure import recording
from jaxpipe.run.measure.bubble import events_of

QUIET = ("train.eval_every=0", "checkpoint.every=0")


@pytest.mark.parametrize(
    ("window", "recorded"),
    [((1, 2), [1, 2]), ((3, 1), [3]), ((3, 9), [3, 4]), ((0, 2), [])],
)
def test_steps_in_the_window_are_recorded(tmp_path, monkeypatch, window, recorded):
    """Complete steps: those dispatched in the window are read in it."""
    start, steps = window
    recorder = Recorder(
        tmp_path, "train.steps=4", *QUIET,
        f"log.profile_start={start}", f"log.profile_steps={steps}", f"run.dir={tmp_path}",
    )  # fmt: skip

    @contextlib.contextmanager
    def watched(directory):
        recorder.events.append(("recording", directory))
        yield
        recorder.events.append(("recorded", directory))

    monkeypatch.setattr(recording, "recording", watched)
    assert recorder.run() == 0
    where = tmp_path / "profile" / "process-0"
    marks = [("recording", where), ("recorded", where)] if recorded else []
    assert recorder.order("recording", "recorded") == marks
    if recorded:
        begin, end = map(recorder.events.index, marks)
        within = recorder.events[begin:end]
        for name in ("batch", "dispatch", "read"):
            assert [step for event, step in within if event == name] == recorded


@pytest.mark.extended
def test_a_run_records_what_the_profiler_shows(tmp_path, capsys):
    command = [str(SMALL), f"run.dir={tmp_path}", "parallel.pp=1", "parallel.dp=8", "train.steps=4"]
    window = ["log.profile_start=2", "log.profile_steps=2"]
    assert train.main([*command, *QUIET, *window]) == 0
    where = tmp_path / "profile" / "process-0"
    assert str(where) in "".join(capsys.readouterr().out.split())
    assert len(list(where.rglob("*.xplane.pb"))) == 1
    (viewed,) = where.rglob("*.trace.json.gz")
    loops = Counter(event.device for event in events_of(viewed) if "while" in event.name)
    assert set(loops.values()) == {2}  # the loops of the step, each once
    assert list(metrics(tmp_path)) == [1, 2, 3, 4]
    assert complete(tmp_path) == [4]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["log.profile_start=13"], "log.profile_start=13 must be at most train.steps=12"),
        (["log.profile_start=1", "log.bubble_every=4"], "jax records one of them at a time"),
    ],
)
def test_a_window_that_cannot_be_is_refused(tmp_path, capsys, more, sentence):
    assert train.main([str(SMALL), f"run.dir={tmp_path}/run", *more]) == 2
    assert sentence in capsys.readouterr().err


def test_of_steps_in_one_program_all_are_recorded():
    how = ["train.fused_steps=4", "log.profile_start=7", "log.profile_steps=3"]
    window = recording.RecordingWindow(load(SMALL, how), print)
    assert [step for step in range(20) if window.turns_at(step)] == [4, 12]
