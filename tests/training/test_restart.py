"""`data.restart`: a run keeps its moments and step, and starts other data from the beginning."""

import jax
import numpy as np
import pytest
from commands import SMALL, complete, metrics

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.contexts import open_run_data
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

ONE = [
    "parallel.pp=1",
    "parallel.dp=1",
    "train.eval_every=0",
    "optimizer.warmup_steps=0",
    "optimizer.decay=constant",
]
OTHER = ["train.seed=7", "train.seq_len=16"]
PER_STEP = 4  # samples: four microbatches of one


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Train up to a step in one directory; return the batches that it used, and its log."""
    put, taken = Trainer.put, []

    def note(self, batch, position=None):
        if position is not None:
            taken.append(batch | {"samples": position})
        return put(self, batch, position)

    monkeypatch.setattr(Trainer, "put", note)
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)

    def of(steps, *more, directory="run", code=0):
        taken.clear()
        own = [f"run.dir={tmp_path / directory}", f"train.steps={steps}"]
        config = load(SMALL, [*ONE, *own, *more])
        try:
            assert train.train(config) == code
        except train.ConfigError as error:
            assert code == 2
            return [], str(error)
        return list(taken), capsys.readouterr().out

    of.directory = tmp_path / "run"
    return of


def assert_equal_batches(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want):
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow
def test_it_goes_on_from_the_beginning_of_the_new_data_once(run):
    fresh, _ = run(8, *OTHER, directory="fresh")
    run(4)
    _, refusal = run(8, *OTHER, code=2)
    assert "data.restart=true to go on with this data from its beginning" in refusal
    restarted, said = run(6, *OTHER, "data.restart=true")
    assert "resumed from step 4" in said
    assert "data.restart: after dummy seed=0" in said
    assert_equal_batches(restarted, fresh[:2])
    requeued, said = run(7, *OTHER, "data.restart=true")  # the same command again
    assert "data.restart:" not in said
    assert_equal_batches(requeued, fresh[2:3])
    without, said = run(8, *OTHER)
    assert_equal_batches(without, fresh[3:4])
    assert [batch["samples"] for batch in (*restarted, *requeued, *without)] == [
        PER_STEP * step for step in range(4, 8)
    ]
    seen = [line["tokens_seen"] for line in metrics(run.directory).values()]
    assert seen == [PER_STEP * 32 * n for n in range(1, 5)] + [
        PER_STEP * (4 * 32 + 16 * n) for n in range(1, 5)
    ]
    back, said = run(10, "data.restart=true")  # the first data again, also from its beginning
    assert "data.restart: after dummy seed=7" in said
    first, _ = run(2, directory="first")
    assert_equal_batches(back, first)
    assert max(complete(run.directory)) == 10


@pytest.mark.slow
def test_moments_step_and_rate_go_on(run):
    """Steps 5 and 6 are bitwise those of the state after step 4 with the new data's first batches,
    computed here from `Trainer` alone.
    """
    run(4, "train.seed=7")
    run(6, "train.seed=0", "data.restart=true")
    got = metrics(run.directory)
    config = load(SMALL, [*ONE, "train.steps=6", "train.seed=7"])
    trainer = Trainer.resolve(config, jax.devices())
    configs = (load(SMALL, [*ONE, f"train.seed={seed}"]) for seed in (7, 0))
    old, new = (open_run_data(one, run.directory, Group()) for one in configs)
    state, sizes = trainer.init(), trainer.sharder.sizes
    for step in range(1, 7):
        data, position = (old, (step - 1) * PER_STEP) if step < 5 else (new, (step - 5) * PER_STEP)
        batch = trainer.put(data.train.batch(position, **sizes), (step - 1) * PER_STEP)
        state, values = trainer.train_step(state, batch)
        if step > 4:
            assert got[step]["loss"] == float(values["loss"])
            assert got[step]["grad_norm"] == float(values["grad_norm"])
