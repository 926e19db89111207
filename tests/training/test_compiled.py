"""Steps of different lengths: each length is compiled once, ahead, and padding changes nothing."""

import re
import shutil
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import SMALL, metrics
from layout import write

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config import load
from jaxpipe.data.batches import DocumentLengths
from jaxpipe.data.sources import open_data
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.run.loop import TrainLoop
from jaxpipe.run.start import start
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.progress import Progress
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.program_store import ProgramStore
from jaxpipe.training import compiled
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.trainer import Trainer

TINY = ["parallel.pp=2", "parallel.dp=1", "model.n_layers=2", "train.grad_accum_steps=2"]
VARIABLE = ["train.variable_length=true", "train.length_bucket=16", "train.pad_to_multiple_of=8"]


def said_to_be_compiled(text):
    return re.findall(r"(\w+) for \d microbatches of (\d+) tokens a row: traced", text)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    rng = np.random.default_rng(0)
    sizes = rng.choice([9, 20, 40, 60, 70], 200, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    documents = [[rng.integers(0, 256, n).tolist()] for n in sizes]
    return write(tmp_path_factory.mktemp("data") / "shard.bin", documents, "uint16")


def run(directory, shard):
    """Run twelve steps on one device, or the rest of them; return the log."""
    config = load(SMALL, [
        *VARIABLE, "parallel.pp=1", "parallel.dp=1", "model.n_layers=1", "train.grad_accum_steps=2",
        "train.seq_len=80", "train.steps=12", "train.eval_every=12", "checkpoint.every=6",
        "data.source=file", f"data.path={shard}", f"run.dir={directory}",
    ])  # fmt: skip
    check_settings(config)
    data = open_data(
        config.data, seq_len=80, vocab_size=256, seed=0, directory=directory, variable_length=True
    )
    trainer, said = Trainer.resolve(config, jax.devices()[:1]), []
    keying = StateKeying(trainer.layout, trainer.sharding)
    saves = CheckpointStore(directory / "checkpoints", keep=10, asynchronous=False, keying=keying)
    with saves as checkpoints, Progress(12, config.log, silent=True) as progress:
        state, seen = start(trainer, data, checkpoints, said.append)
        progress.say = said.append
        with MetricsLog(directory, last_step=int(state.step)) as log:
            loop = TrainLoop(trainer, data, checkpoints, progress, log, Group())
            assert loop.loop(state, seen) == 0
    return "\n".join(map(str, said))


@pytest.mark.slow
def test_a_run_over_five_lengths_resumes_bitwise(tmp_path, shard):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = run(whole, shard)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "12")
    second = run(parts, shard)
    assert "resumed from step 6" in second
    for text in (first, second):
        made = said_to_be_compiled(text)
        assert len(made) == len(set(made))
    lengths = {int(length) for name, length in said_to_be_compiled(first) if name == "train_step"}
    assert lengths == {16, 32, 48, 64, 80}
    want, got = metrics(whole), metrics(parts)
    seen = 0
    for step, line in want.items():
        for name in ("loss", "grad_norm", "eval_loss", "tokens_seen", "padded_tokens"):
            assert got[step].get(name) == line.get(name)
        tokens = line["tokens_seen"] - seen
        assert (tokens + line["padded_tokens"]) / 2 in lengths
        assert line["packing_efficiency"] == tokens / (tokens + line["padded_tokens"])
        rate = tokens / line["step_seconds"]
        assert line["tokens_per_second"] == pytest.approx(rate, rel=1e-12)
        seen = line["tokens_seen"]


@pytest.mark.slow(unless=["best_fit"])
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_padding_changes_neither_loss_nor_gradient(packing):
    """And microbatches that are all padding contribute zeros."""
    config = load(SMALL, [*TINY, *VARIABLE, f"data.packing={packing}"])
    trainer = Trainer.resolve(config, jax.devices()[:2])
    names, params = trainer.sharder.leaves, trainer.init().params
    tokens = np.random.default_rng(0).integers(0, 256, (2, 1, 17), np.int32)
    short = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:].copy()}
    short["targets"][:, :, 9] = -100
    segments = np.repeat(np.int32([0, 1]), [10, 6])
    positions = np.concatenate([np.arange(10), np.arange(6)]).astype(np.int32)
    short |= {"segments": np.tile(segments, (2, 1, 1)), "positions": np.tile(positions, (2, 1, 1))}
    short = {name: short[name] for name in names}
    nothing = {"inputs": 0, "targets": -100, "segments": -1, "positions": 0}
    step = jax.jit(trainer.pipeline.losses_and_gradients)

    def padded(leaf, name):
        return np.pad(leaf, ((0, 0), (0, 0), (0, 16)), constant_values=nothing[name])

    longer = {name: padded(leaf, name) for name, leaf in short.items()}
    want, got = (step(params, trainer.put(batch)) for batch in (short, longer))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), got, want)

    longer["targets"][1] = -100
    losses, gradients = step(params, trainer.put(longer))
    empty = {name: leaf.copy() for name, leaf in longer.items()}
    for name, leaf in empty.items():
        leaf[1] = nothing[name]
    same_losses, same_gradients = step(params, trainer.put(empty))
    assert losses[1] == same_losses[1] == 0
    np.testing.assert_array_equal(losses, same_losses)
    jax.tree.map(np.testing.assert_array_equal, gradients, same_gradients)
    empty = {name: np.full_like(leaf, nothing[name]) for name, leaf in empty.items()}
    for leaf in jax.tree.leaves(step(params, trainer.put(empty))):
        assert not np.asarray(leaf).any()


class Steps:
    """A trainer that records compilations; its program returns the length it is compiled for."""

    samples_per_step = 4

    def __init__(self):
        self.config = load(SMALL, [*VARIABLE, "train.seq_len=96", "parallel.slices=2"])
        self.compiled, self.threads = [], set()
        self.sharder = SimpleNamespace(shapes=lambda length, trains: length)
        self.state_shapes, self.programs = None, ProgramStore("", [])
        self.train_step = self.eval_step = self

    def lower(self, _, length):
        self.compiled.append(length)
        self.threads.add(threading.current_thread())
        return SimpleNamespace(compile=lambda: lambda state, batch: length)


def batch_of(length):
    """Return a batch of four microbatches, in two slices each."""
    return {"inputs": np.zeros((8, 1, length // 2))}


def test_lengths_are_compiled_before_their_steps_and_no_more_than_once(monkeypatch):
    monkeypatch.setattr(compiled, "_KEPT", 3)
    waits = []  # for the other processes
    group = SimpleNamespace(barrier=waits.append, count=1)
    trainer, said = Steps(), []
    longest = [5, 20, 20, 33, 5, 70, 90]
    data = SimpleNamespace(
        contents=lambda at, step: DocumentLengths(step, longest[at // step], None)
    )
    with CompiledSteps(trainer, group, said.append) as steps:
        for _ in range(2):
            assert steps.train_step(None, batch_of(16)) == 16
        assert len(waits) == 1
        steps.look_ahead(data, 0, left=4)
        assert steps.train_step(None, batch_of(32)) == 32
        steps.look_ahead(data, 4, left=3)
        assert steps.train_step(None, batch_of(48)) == 48
        assert trainer.compiled == [16, 32, 48]
        steps.look_ahead(data, 8, left=4)  # 70 and 90: the run goes on further than planned
        assert steps.train_step(None, batch_of(96)) == 96
        assert trainer.compiled == [16, 32, 48, 80, 96]
        assert steps.eval_step(None, batch_of(96)) == 96
        assert steps.train_step(None, batch_of(32)) == 32  # only three of the five are kept
    assert trainer.compiled == [16, 32, 48, 80, 96, 96, 32]
    assert len(waits) == len(trainer.compiled) - 1  # 80 did not run
    assert threading.current_thread() not in trainer.threads
    assert len(trainer.threads) == 1
    assert said_to_be_compiled(said[0]) == [("train_step", "16")]
