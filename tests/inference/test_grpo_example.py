"""The example of reinforcement learning, and the states that it starts from."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import SMALL
from saved_runs import saved_run

from jaxpipe import config as configs
from jaxpipe.checkpoint.__main__ import main as checkpoint_command
from jaxpipe.config import ConfigError
from jaxpipe.inference.loaded_model import initial_state
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.training.trainer import Trainer

HOME = Path(__file__).parents[2]
EXAMPLE = "jaxpipe.inference.grpo_example"
TINY = (
    "model.n_layers=2", "model.d_model=32", "train.seq_len=24", "train.grad_accum_steps=2",
    "train.microbatch_size=4", "parallel.pp=2", "parallel.dp=1", "runtime.cpu_devices=2",
    "optimizer.decay=constant", "optimizer.warmup_steps=0", "model.dropout=0.1",
    "optimizer.lr=1e-3",
)  # fmt: skip


def example(directory, *overrides):
    """Return the numbers of every line that a run of the example prints, by step."""
    words = [sys.executable, "-m", EXAMPLE, "configs/quickstart.toml", *TINY, *overrides]
    made = subprocess.run(
        [*words, f"run.dir={directory}"], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    lines = re.findall(r"step (\d+) reward ([\d.]+) (.*)", made.stdout)
    return {int(step): (float(reward), numbers) for step, reward, numbers in lines}


@pytest.mark.extended
def test_the_example_trains_and_goes_on(tmp_path):
    assert len((HOME / "jaxpipe/inference/grpo_example.py").read_text().splitlines()) <= 120
    whole = example(tmp_path / "whole", "train.steps=4")
    assert list(whole) == [2, 4]
    kl = [float(re.search("'kl': ([\\d.e-]+)", numbers)[1]) for _, numbers in whole.values()]
    assert 0 < min(kl) < max(kl) < 0.5
    first = example(tmp_path / "parts", "train.steps=2")
    assert first | example(tmp_path / "parts", "train.steps=4") == whole
    (other,) = example(tmp_path / "other", "train.steps=2", f"checkpoint.resume={tmp_path}/whole")
    assert other == 2


@pytest.mark.extended
def test_a_state_starts_from_a_run_and_from_hugging_face(tmp_path):
    _, state, _ = saved_run(tmp_path / "run")
    assert (
        checkpoint_command(["export", str(tmp_path / "run/checkpoints/2"), str(tmp_path / "hf")])
        == 0
    )
    config = configs.load(SMALL, ["model.n_layers=2", "parallel.pp=2", "parallel.dp=2"])
    trainer = Trainer.resolve(config, jax.devices()[:4])
    for source in ("run", "run/checkpoints/2", "hf"):
        began = initial_state(SavedModel.open(tmp_path / source), trainer)
        assert int(began.step) == 0
        np.testing.assert_array_equal(
            began.params["embed_head"]["embed"], state.params["embed_head"]["embed"]
        )
    other = configs.load(SMALL, ["model.n_layers=2", "model.rope_theta=3e4", "parallel.pp=2"])
    other = Trainer.resolve(other, jax.devices()[: other.parallel.devices])
    with pytest.raises(ConfigError, match="rope_theta"):
        initial_state(SavedModel.open(tmp_path / "hf"), other)
