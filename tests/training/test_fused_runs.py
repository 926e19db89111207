"""Runs whose programs run several steps: what they log, save and resume from, how they stop."""

import os
import shutil
import signal
from io import StringIO

import jax
import numpy as np
import pytest
from commands import complete, losses, metrics
from rich.console import Console
from routed import batches, restored, run
from test_fused_steps import trainer_of
from toy import NOT_FINITE

from jaxpipe.training.fused import programs

# Clips the first two steps, whose norms are 0.77 and 0.71.
STEPS = ["train.steps=7", "optimizer.clip_norm=0.7", "train.grad_accum_steps=4"]
HOW = ["parallel.schedule=zb_h2", "parallel.dp=1", *STEPS]
SAMPLES = 16  # in a step


def so_many(fused, pp=2):
    """Return a trainer of seven steps, `fused` in a program, saved after every third."""
    every = [f"train.fused_steps={fused}", f"checkpoint.every={3 * (fused != 2)}"]
    return trainer_of(*HOW, *every, f"parallel.pp={pp}")


def same_runs(one, two, trainer):
    (got, meta), (want, wanted) = (restored(trainer, path) for path in (one, two))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for name in ("position", "tokens", "guard"):
        assert meta[name] == wanted[name]
    assert losses(one) == losses(two)


def test_programs_of_several_steps_begin_at_multiples_of_their_number():
    found = programs(so_many(3).config.train, done=1)
    assert [list(steps) for steps in found] == [[2], [3], [4, 5, 6], [7]]


@pytest.mark.slow
def test_a_run_logs_and_saves_as_one_of_single_steps(tmp_path):
    """Two programs of three steps, and a single step."""
    for fused in (1, 3):
        assert run(so_many(fused), tmp_path / str(fused)) == 0
    assert complete(tmp_path / "3") == [3, 6, 7]
    same_runs(tmp_path / "3", tmp_path / "1", so_many(1))
    lines = metrics(tmp_path / "3")
    assert lines[1]["step_seconds"] == lines[2]["step_seconds"] == lines[3]["step_seconds"]
    assert [step for step, line in lines.items() if "data_seconds" in line] == [1, 4, 7]
    for step, line in metrics(tmp_path / "1").items():
        assert line["lr"] == lines[step]["lr"]
        assert line["grad_norm"] == pytest.approx(lines[step]["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_other_programs_on_another_mesh(tmp_path):
    """From step 3: as single steps, and with one step up to the next multiple of two."""
    assert run(so_many(3), tmp_path / "started") == 0
    for step in (6, 7):
        shutil.rmtree(tmp_path / "started" / "checkpoints" / str(step))
    for fused in (1, 2):
        shutil.copytree(tmp_path / "started", tmp_path / str(fused))
        assert run(so_many(fused, pp=4), tmp_path / str(fused)) == 0
    same_runs(tmp_path / "2", tmp_path / "1", so_many(1))


@pytest.mark.slow
def test_a_step_that_is_not_finite_stops_a_run_within_a_program(tmp_path):
    said = []
    for fused in (1, 3):
        trainer, path = so_many(fused), tmp_path / str(fused)
        console = Console(file=StringIO(), width=400)
        assert run(trainer, path, console=console, data=without_step_five) == 1
        (error,) = [line for line in console.file.getvalue().splitlines() if "error:" in line]
        said.append(error)
        assert complete(path)[-1] == 4
        assert list(metrics(path)) == [1, 2, 3, 4, 5]
    assert said[0] == said[1]
    assert "at step 5, samples 64..79" in said[0]
    same_runs(tmp_path / "3", tmp_path / "1", so_many(1))


def without_step_five(position, **sizes):
    """Yield the batches; that of step 5 has a NaN loss."""
    for number, batch in enumerate(batches(position, **sizes), start=position // SAMPLES + 1):
        bad = {"positions": np.full_like(batch["positions"], NOT_FINITE)} if number == 5 else {}
        yield batch | bad


@pytest.mark.slow
def test_a_signal_stops_a_run_after_the_program(tmp_path):
    def signalling(position, **sizes):
        for number, batch in enumerate(batches(position, **sizes)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    assert run(so_many(3), tmp_path, data=signalling) == 128 + signal.SIGTERM
    assert complete(tmp_path) == list(metrics(tmp_path))[-1:] == [3]
