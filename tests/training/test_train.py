"""The command as a user runs it: training, resuming, being killed, and bad input."""

import shutil
import signal
import time
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import SMALL, complete, metrics, start, train_command

from jaxpipe import train
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config import load
from jaxpipe.core.contract import Aux
from jaxpipe.training.trainer import Trainer

OTHER = {  # layouts of the same global batch
    "pp1_dp2": ["parallel.pp=1", "parallel.dp=2"],
    "pp3_dp1": ["parallel.pp=3", "parallel.dp=1", "train.microbatch_size=2"],
    "zbv": ["parallel.schedule=zbv", "parallel.pp=2"],
    "dualpipe": ["parallel.schedule=dualpipe", "parallel.pp=2", "parallel.layer_split=[1,3]"],
    "tp2": ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true"],
    "zero3": ["parallel.pp=1", "parallel.tp=4", "parallel.zero_stage=3"],
    "vocab": ["parallel.pp=2", "parallel.tp=2", "parallel.vocab_parallel_pp=true"],
    "slices": ["parallel.pp=2", "parallel.dp=1", "train.microbatch_size=2", "parallel.slices=4"],
    "zero0": ["parallel.pp=2", "parallel.zero_stage=0", "parallel.pipeline_first=true"],
}


def spawn(directory, *overrides, devices=8):
    return start(train_command(directory, *overrides, devices=devices))


def devices_of(overrides):
    parallel = load(SMALL, overrides).parallel
    return parallel.devices


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """With dp=-1, which gives two replicas on 8 devices with pp=4, as in the file."""
    directory = tmp_path_factory.mktemp("run")
    assert train.main([str(SMALL), f"run.dir={directory}", "parallel.dp=-1"]) == 0
    return directory


def test_loss_falls_and_every_step_is_logged(uninterrupted):
    logged = metrics(uninterrupted)
    assert sorted(logged) == list(range(1, 13))
    keys = {"step", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds"}
    assert all(keys <= line.keys() for line in logged.values())
    assert [step for step, line in logged.items() if "eval_loss" in line] == [6, 12]
    assert logged[12]["eval_loss"] < logged[6]["eval_loss"] < logged[1]["loss"]


@pytest.mark.slow
def test_killed_while_saving_then_resumed_elsewhere(tmp_path, uninterrupted):
    """kill -9 in the middle of a later save; the run resumes under another schedule."""
    process = spawn(tmp_path, "checkpoint.every=1", "train.steps=12")
    saves = tmp_path / "checkpoints"
    while not (saves / "4").exists() or not any("tmp" in path.name for path in saves.iterdir()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.001)
    process.kill()
    process.communicate()
    newest = max(complete(tmp_path))
    assert 4 <= newest < 12
    process = spawn(tmp_path, *OTHER["zbv"], devices=devices_of(OTHER["zbv"]))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"resumed from step {newest} (saved with pp=4 dp=2 tp=1 1f1b)" in output
    got, want = metrics(tmp_path), metrics(uninterrupted)
    assert sorted(got) == sorted(want)
    losses = [[run[step]["loss"] for step in sorted(want)] for run in (got, want)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.extended
def test_a_deterministic_run_is_bitwise_the_same_again(tmp_path, uninterrupted):
    """On CPU every run is deterministic; for GPUs: tests/lab/gpu/test_compiler.py."""
    assert train.main([str(SMALL), f"run.dir={tmp_path}", "train.deterministic=true"]) == 0
    runs = [metrics(directory) for directory in (tmp_path, uninterrupted)]
    for name in ("loss", "grad_norm", "eval_loss"):
        got, want = ([line.get(name) for line in run.values()] for run in runs)
        assert got == want
    (got, _), (want, _) = restored(tmp_path), restored(uninterrupted)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def trainer_of(*overrides):
    return Trainer.resolve(load(SMALL, overrides), jax.devices()[: devices_of(overrides)])


def restored(directory, *overrides):
    """Return `(state keyed by layer as numpy, meta)` of the newest checkpoint, on some layout."""
    trainer = trainer_of(*overrides)
    keying = StateKeying(trainer.layout, trainer.sharding)
    where = directory / "checkpoints"
    with CheckpointStore(where, keep=10, asynchronous=False, keying=keying) as checkpoints:
        state, meta = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    return jax.tree.map(np.asarray, keying.to_keyed(state)), meta


@pytest.mark.slow(unless=["slices"])
@pytest.mark.parametrize("layout", ["slices", "zero0"])  # test_reshard.py has the others
def test_restored_state_is_bitwise_the_same(uninterrupted, layout):
    want, meta = restored(uninterrupted)
    got, _ = restored(uninterrupted, *OTHER[layout])
    assert meta["position"] == 12 * 4 * 2
    jax.tree.map(np.testing.assert_array_equal, got, want)


@cache
def initial(*overrides):
    trainer = trainer_of(*overrides)
    keyed = StateKeying(trainer.layout, trainer.sharding).to_keyed(trainer.init().params)
    return jax.tree.map(np.asarray, keyed)


@pytest.mark.slow(unless=["zbv", "tp2"])
@pytest.mark.parametrize("layout", OTHER)
def test_initial_values_are_the_same_on_every_layout(layout):
    jax.tree.map(np.testing.assert_array_equal, initial(*OTHER[layout]), initial())


def test_a_step_does_not_recompile_or_move_the_state():
    trainer = Trainer.resolve(load(SMALL))
    state = trainer.init()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch = {name: np.zeros((4, 2, 32), np.int32) for name in ("inputs", "targets")}
    for _ in range(2):
        state, _ = trainer.train_step(state, trainer.put(batch))
        assert trainer.train_step._cache_size() == 1
    same = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), state, shardings
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="seen with jax 0.10: its XLA copies the moments"
)
def test_an_update_overwrites_the_state_and_copies_none_of_it():
    trainer = Trainer.resolve(load(SMALL, ["parallel.pp=1", "parallel.dp=1"]), jax.devices()[:1])
    state = trainer.init()
    update = jax.jit(lambda *given: trainer.update(*given)[0], donate_argnums=0)
    program = update.lower(state, np.float32(0), state.params, Aux()).compile().as_text()
    copied = [line.split(" copy(")[0] for line in program.splitlines() if " copy(" in line]
    shapes = {f"f32[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(state.params)}
    assert [line for line in copied if any(shape in line for shape in shapes)] == []


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_saves(tmp_path, uninterrupted):
    process = spawn(tmp_path, "train.steps=12", "checkpoint.every=0")
    while "step 3/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "SIGINT: stopped after step" in output
    assert train.main([str(SMALL), f"run.dir={tmp_path}"]) == 0
    losses = [
        [run[step]["loss"] for step in range(1, 13)]
        for run in map(metrics, (tmp_path, uninterrupted))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.extended
def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path, monkeypatch, capsys):
    explode = ["optimizer.lr=1e18", "optimizer.clip_norm=0", "optimizer.warmup_steps=0"]
    with monkeypatch.context() as patch:  # as on a full disk
        patch.setattr(CheckpointStore, "save", lambda *_: None)
        assert train.main([str(SMALL), f"run.dir={tmp_path / 'full'}", *explode]) == 4
        said = " ".join(capsys.readouterr().out.split())
        assert "is not saved in" in said
        assert "are saved" not in said
    assert train.main([str(SMALL), f"run.dir={tmp_path}", *explode]) == 1
    logged = metrics(tmp_path)
    last = max(logged)
    assert logged[last]["loss"] is None or logged[last]["grad_norm"] is None
    said = " ".join(capsys.readouterr().out.split())
    first = (last - 1) * 8
    assert f"at step {last}, samples {first}..{first + 7} of the training order" in said
    assert f"the parameters of step {last - 1} are saved" in said
    state, meta = restored(tmp_path)
    assert (int(state["step"]), meta["position"]) == (last - 1, first)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


def refused(capsys, directory, *overrides):
    """Return the sentence printed for bad input; check that no file is left behind."""
    before = sorted(path for path in Path(directory).rglob("*"))
    assert train.main([str(SMALL), f"run.dir={directory}/run", *overrides]) == 2
    assert sorted(path for path in Path(directory).rglob("*")) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["parallel.dp=4"], "must equal the number of devices, 8"),
        (["parallel.ppp=4"], "did you mean parallel.pp?"),
        (["parallel.schedule=zigzag"], "Choose one of gpipe, 1f1b"),
        (["train.grad_accum_steps=3"], "cannot fill parallel.pp=4 under 1f1b: use at least 4"),
        (["model.vocab_size=100", "data.source=stdlib"], "model.vocab_size=100"),
        (["data.source=file", "data.path=missing.bin"], "missing.bin"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, capsys, overrides, sentence):
    assert sentence in refused(capsys, tmp_path, *overrides)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "empty"), (b"\x01" * 2001, "multiple"), (b"\xff" * 4000, "65535")],
)
def test_bad_data_files(tmp_path, capsys, content, sentence):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    said = refused(capsys, tmp_path, "data.source=file", f"data.path={path}")
    assert sentence in said
    assert "tokens.bin" in said


def test_data_that_cannot_be_read(tmp_path, capsys):
    path = tmp_path / "tokens.npy"
    path.symlink_to(path)
    said = refused(capsys, tmp_path, "data.source=file", f"data.path={path}")
    assert "the data cannot be read" in said
    assert str(path) in said


def test_a_run_directory_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "run").touch()
    assert "cannot be written" in refused(capsys, tmp_path)


def test_another_model_or_other_data_in_the_directory(uninterrupted, capsys):
    command = [str(SMALL), f"run.dir={uninterrupted}"]
    before = sorted(Path(uninterrupted).rglob("*"))
    for overrides, sentence in [
        (["model.d_ff=96"], "params/layers/0/mlp/w_down has shape (64, 32) there and (96, 32)"),
        (["train.seed=5"], "another run.dir"),
        (["checkpoint.resume=none"], "holds checkpoints of steps [4, 8, 12]"),
    ]:
        assert train.main([*command, *overrides]) == 2
        assert sentence in capsys.readouterr().err
    assert sorted(Path(uninterrupted).rglob("*")) == before


def test_a_finished_run_says_so(uninterrupted, capsys):
    logged = metrics(uninterrupted)
    assert train.main([str(SMALL), f"run.dir={uninterrupted}"]) == 0
    assert "nothing to do: train.steps=12 is reached" in capsys.readouterr().out
    assert metrics(uninterrupted) == logged


def test_print_config_is_a_configuration(tmp_path, capsys):
    assert train.main([str(SMALL), "parallel.pp=2", "--print-config"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed) == load(SMALL, ["parallel.pp=2"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "muon", "schedule_free"])
def test_other_optimizers_resume_elsewhere(tmp_path, optimizer, capsys):
    """Truncated to the middle, it resumes alike on another mesh.

    Within 1e-5: signs of vanishing gradients (Lion) and Muon's iteration magnify rounding.
    """
    how = [f"optimizer.name={optimizer}", "optimizer.lr=3e-3", "train.eval_every=0",
           "train.steps=6", "checkpoint.every=3", "optimizer.decay=constant"]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train.main([str(SMALL), f"run.dir={whole}", *how]) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "6")
    other = ["parallel.pp=2", "parallel.tp=2"]
    assert train.main([str(SMALL), f"run.dir={cut}", *how, *other]) == 0
    assert "resumed from step 3" in capsys.readouterr().out
    got, want = metrics(cut), metrics(whole)
    losses = [[run[step]["loss"] for step in range(4, 7)] for run in (got, want)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
