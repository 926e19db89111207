"""Runs in which one process is slow: which one is named, and what of it.

`STRAGGLER_TRIALS=100` repeats the trials with a process that is slower by a fifth.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, metrics
from several import ends, start_all
from slow import SPAN, slow_process

from jaxpipe.run.measure.slow_process import Blame, Finding, StragglerWindow, find_op, find_process
from jaxpipe.schedules.timing.lost_time import LINK, LostTime

SCRIPT = Path(__file__).parent / "slow.py"
TRIALS = int(os.environ.get("STRAGGLER_TRIALS", "3"))


def window(index, **seconds):
    return StragglerWindow(4, f"host{index}, pp={index}", steps=10, step=50, counted=8, **seconds)


def test_a_window_holds_what_devices_wait_for():
    """Devices end a step at 10 and get the next at 13, whose batch was asked for at 11."""
    found = StragglerWindow(0, "")
    found.add(before=10.0, asked=11.0, dispatched=13.0, done=20.0, steps=1)
    assert (found.seconds, found.host, found.data, found.counted) == (10.0, 1.0, 2.0, 1)
    # a step that is dispatched before the one before it ends adds no wait; two steps a program
    found.add(before=20.0, asked=14.0, dispatched=15.0, done=26.0, steps=2)
    assert (found.host, found.data, found.counted) == (1 / 3, 2 / 3, 3)
    np.testing.assert_allclose(found.seconds, 16 / 3)
    half = StragglerWindow(0, "")
    half.add(before=10.0, asked=9.0, dispatched=12.0, done=20.0, steps=1)
    assert (half.host, half.data) == (0.0, 2.0)


def test_the_process_that_others_wait_for_is_found():
    """All devices wait 0.2 s for their hosts, those of process 2 0.3 s more for their data."""
    windows = [window(i, host=0.2, data=0.3 * (i == 2), seconds=1.0) for i in range(4)]
    asked = []
    found = find_process(windows, lambda *late: asked.append(late) or 0.25)
    assert asked == [(2, 0.3)]
    assert found == Finding(2, "host2, pp=2", "its devices wait for its data loader", 0.25)


def said(findings):
    """What is said after each window of ten steps of 1 s, the first of which begin at 1."""
    blame = Blame()
    steps = [10 * number + 1 for number in range(len(findings))]
    return [blame.add(found, 1.0, first, first + 9) for found, first in zip(findings, steps)]


FOUND = find_op(LostTime(0.1, 1, 0, LINK), window(3), 3)


def test_what_is_slow_for_more_than_20_steps_is_named_once():
    cheap = FOUND._replace(lost=0.02)
    sentences = said([FOUND, cheap] + [FOUND] * 6 + [cheap] * 2)
    assert [number for number, sentence in enumerate(sentences) if sentence] == [4, 8]
    assert sentences[4] == (
        "process 3 (host3, pp=3) slows the steps since step 21: the link between pipeline ranks 1 "
        "and 2 is slow, which costs 0.100 of 1.000 s a step (10%)"
    )
    assert sentences[8].startswith("process 3 no longer slows the steps")


def test_one_window_that_is_measured_low_does_not_hide_a_slow_process():
    """The median of three windows is said, of the cause that most of them have."""
    low = FOUND._replace(lost=0.03, words="every op is slow")
    sentences = said([FOUND, low, FOUND._replace(lost=0.08), low, low])
    assert [number for number, sentence in enumerate(sentences) if sentence] == [2]
    assert "the link between" in sentences[2]
    assert "costs 0.080" in sentences[2]


def test_one_window_that_is_measured_high_names_nobody():
    low = FOUND._replace(lost=0.03)
    assert said([low, FOUND._replace(lost=2.0), low, low]) == [None] * 4
    other = FOUND._replace(process=1)
    assert said([FOUND, FOUND, other, FOUND, FOUND]) == [None] * 5


NAMED = re.compile(
    r"process (\d) \(.*\) slows the steps since step (\d+): (.*), which costs ([\d.]+) of"
)


def run(directory, way, seconds, slow, *overrides, timeout=200):
    """Run four processes, pp=2 x dp=2; return `(process, since, words, cost)` of what is named."""
    command = [sys.executable, str(SCRIPT), str(slow), way, str(seconds), str(SMALL)]
    sizes = ["parallel.pp=2", "parallel.dp=2", "runtime.cpu_devices=1", "train.eval_every=0"]
    steps = [f"run.dir={directory}", "train.steps=61", "checkpoint.every=0", *overrides]
    first, *others = ends(start_all(4, [*command, *sizes, *steps]), timeout)
    assert [code for code, _ in (first, *others)] == [0] * 4, first
    return [(int(p), int(s), words, float(c)) for p, s, words, c in NAMED.findall(first[1])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "slow", "words"),
    [
        ("in_data", 3, "its devices wait for its data loader"),
        ("on_host", 1, "its devices wait for its host"),
    ],
)
def test_a_process_whose_host_is_slow_is_named(tmp_path, way, slow, words):
    ((process, _, said, _),) = run(tmp_path, way, 0.15, slow)
    assert (process, said) == (slow, words)
    lines = metrics(tmp_path)
    found = [line["lost_seconds"] for line in lines.values() if "lost_seconds" in line]
    np.testing.assert_allclose(np.median(found), 0.15, rtol=0.2)
    idle = lines[max(s for s in lines if "lost_seconds" in lines[s])]
    assert np.argmax(np.add(idle["data_idle_seconds"], idle["host_idle_seconds"])) == slow


@pytest.mark.slow
def test_a_process_whose_ops_are_slow_is_named(tmp_path):
    """A sleep in a host callback of every tick."""
    how = ["log.bubble_every=10", "debug.print_messages=true"]
    ((process, _, words, _),) = run(tmp_path, "in_ops", 0.02, 2, *how)
    assert process == 2
    assert re.fullmatch(r"(every op|the op \w+) of pipeline rank 1 takes longer than .*", words)


@pytest.mark.slow
def test_of_processes_alike_none_is_named(tmp_path):
    assert run(tmp_path, "in_data", 0, 0, "log.bubble_every=10") == []


@pytest.mark.slow
def test_a_process_that_is_slower_by_a_fifth_is_named_with_its_cost(tmp_path):
    """In 30 steps of every 60 one process computes 20 % longer; nobody is named in the others."""
    steps = (2 * TRIALS + 1) * SPAN
    how = ["log.bubble_every=10", "train.grad_accum_steps=2", f"train.steps={steps}"]
    named = run(tmp_path, "in_spans", 0.03, "any", *how, timeout=200 + 2 * steps)
    logged = metrics(tmp_path).items()
    takes = [
        np.median([of["step_seconds"] for step, of in logged if step // SPAN == span])
        for span in range(2 * TRIALS + 1)
    ]
    slower = range(1, 2 * TRIALS, 2)
    costs = {span: takes[span] - (takes[span - 1] + takes[span + 1]) / 2 for span in slower}
    right = {since // SPAN: cost for process, since, _, cost in named
             if process == slow_process(since // SPAN)}  # fmt: skip
    assert len(named) == len(right)
    assert len(right) >= 0.95 * TRIALS
    np.testing.assert_allclose(np.median([right[at] / costs[at] for at in right]), 1, atol=0.2)
