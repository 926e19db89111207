"""A run of several processes that goes on with fewer of them (`runtime.min_devices`)."""

import re
import signal
import sys
import time

import numpy as np
import pytest
from commands import SMALL, complete, losses, train_command
from several import ends, start_all

from jaxpipe import train

SETTINGS = ["runtime.min_devices=4", "train.eval_every=0", "optimizer.decay=constant"]


@pytest.mark.extended
def test_those_that_are_needed_start_anew():
    """They meet as processes of a smaller run, and the third ends."""
    code = "\n".join([
        "from jaxpipe.runtime import processes",
        "processes.join()",
        "needed = processes.go_on_with(2, 'two suffice')",
        "print(processes.place(), needed, processes.group().gather('name', 'here'))",
        "processes.finish()",
    ])  # fmt: skip
    ended = ends(start_all(3, [sys.executable, "-c", code], {"JAX_PLATFORMS": "cpu"}))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert [output.splitlines()[-1] for _, output in ended[:2]] == [
        f"({index}, 2) True ['here', 'here']" for index in range(2)
    ]
    assert ended[2][1] == "process 2 is not needed: two suffice\n(0, 1) False ['here']\n"


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_process(tmp_path):
    """Of pp=4 x dp=2 on four processes three are left, of which pp=4 x dp=1 needs two."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    group = start_all(4, train_command(run, *SETTINGS, "train.steps=100000", devices=2))
    deadline = time.monotonic() + 300
    while not complete(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    group[0].send_signal(signal.SIGKILL)
    assert [code for code, _ in ends(group)] == [-9, 3, 3, 3]
    saved = complete(run)[-1]
    settings = [*SETTINGS, f"train.steps={saved + 4}"]
    assert train.main([str(SMALL), f"run.dir={whole}", *settings]) == 0
    ended = ends(start_all(3, train_command(run, *settings, devices=2)))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    changed = (
        "6 of 8 devices are left (runtime.min_devices=4): parallel.dp=1 instead of 2, "
        "train.grad_accum_steps=8 instead of 4; a step keeps its 256 tokens; unused devices: 2"
    )
    assert f"process 2 is not needed: {changed}\n" in ended[2][1]
    first = ended[0][1]
    assert changed.replace("6", "4", 1).partition("; unused")[0] in first
    assert re.search(rf"resumed from step {saved} \(saved with pp=4 dp=2 .*\)", first)
    assert list(losses(run)) == list(range(1, saved + 5))
    np.testing.assert_allclose(list(losses(run).values()), list(losses(whole).values()), rtol=1e-6)
