"""Starts of a run: from a seed, another run's checkpoint, or its parameters alone."""

import fnmatch
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from jaxpipe import train
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.exclusion import leaves_by_name
from jaxpipe.checkpoint.integrity import add_checksum
from jaxpipe.config import load, to_toml
from jaxpipe.run.contexts import open_run_data
from jaxpipe.run.start import rate_jump, start
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

SMALL = str(Path(__file__).parents[1] / "data" / "small.toml")


def losses(directory):
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def stored(directory, step):
    return ocp.StandardCheckpointer().restore(Path(directory) / "checkpoints" / str(step) / "state")


def flat(tree):
    """Return arrays as numpy by their names on disk."""
    return flatten_dict(jax.tree.map(np.asarray, tree), sep="/")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    assert train.main([SMALL, f"run.dir={directory}"]) == 0
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["parallel.pp=2", "parallel.tp=2"]])
def test_a_seed_made_on_one_device_starts_any_mesh(tmp_path, run, layout, capsys):
    assert train.main([SMALL, f"run.dir={tmp_path}", "--seed-checkpoint"]) == 0
    assert not (tmp_path / "metrics.jsonl").exists()
    assert train.main([SMALL, f"run.dir={tmp_path}", *layout]) == 0
    assert "resumed from step 0 (saved with pp=1 dp=1 tp=1 gpipe)" in capsys.readouterr().out
    got, want = losses(tmp_path), losses(run)
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-6)


@pytest.mark.extended
def test_no_second_seed(run, capsys):
    assert train.main([SMALL, f"run.dir={run}", "--seed-checkpoint"]) == 2
    assert "already holds checkpoints of steps [4, 8, 12]" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["checkpoint.resume={run}", "lora.adapter={run}"])
def test_a_seed_of_other_values_is_refused(tmp_path, run, setting, capsys):
    given = [setting.format(run=run), *["lora.rank=2"] * setting.startswith("lora")]
    assert train.main([SMALL, f"run.dir={tmp_path}", "--seed-checkpoint", *given]) == 2
    assert f"--seed-checkpoint with {setting.split('=')[0]}=" in capsys.readouterr().err


def test_a_seed_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "save", lambda *given: None)
    assert train.main([SMALL, f"run.dir={tmp_path}", "--seed-checkpoint"]) == 4


def test_an_adapter_does_not_replace_those_of_a_full_state(tmp_path, run, capsys):
    given = [f"checkpoint.resume={run}", "lora.adapter=nowhere", "lora.rank=2"]
    assert train.main([SMALL, f"run.dir={tmp_path}", *given]) == 2
    assert "lora.adapter='nowhere' with the full state of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/8"])
def test_go_on_from_another_run(tmp_path, run, path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints" / "12")
    command = [SMALL, f"run.dir={tmp_path / 'new'}", "--resume", str(other / path)]
    assert train.main(command) == 0
    assert "resumed from step 8" in capsys.readouterr().out
    got, want = losses(tmp_path / "new"), losses(run)
    assert list(got) == [9, 10, 11, 12]
    np.testing.assert_allclose(list(got.values()), [want[step] for step in got], rtol=1e-6)
    assert train.main([*command, "train.steps=13"]) == 0  # now from its own checkpoints
    assert "resumed from step 12" in capsys.readouterr().out


@pytest.mark.slow
def test_parameters_alone_start_a_run_of_other_data(tmp_path, run, capsys):
    command = [SMALL, f"run.dir={tmp_path}", f"checkpoint.resume={run}", "train.seed=7"]
    assert train.main(command) == 2
    remedy = "in another run.dir, with checkpoint.resume=PATH checkpoint.parameters_only=true"
    assert f"or take its parameters alone, {remedy}." in capsys.readouterr().err
    shutil.rmtree(tmp_path / "checkpoints")
    start = ["checkpoint.parameters_only=true", "parallel.pp=2", "parallel.tp=2"]
    small_steps = ["optimizer.lr=1e-30", "optimizer.weight_decay=0", "train.steps=1"]
    assert train.main([*command, *start, *small_steps, "optimizer.warmup_steps=0"]) == 0
    assert "started with the parameters of" in capsys.readouterr().out
    state = stored(tmp_path, 1)
    jax.tree.map(np.testing.assert_array_equal, state["params"], stored(run, 12)["params"])
    assert int(state["step"]) == 1


@pytest.mark.parametrize(
    "mesh",
    [["parallel.pp=2", "parallel.tp=2"], ["parallel.pp=2", "parallel.layer_split=[1,3]"],
     ["parallel.pp=2", "parallel.dp=3"]],
)  # fmt: skip
def test_leaves_that_are_excluded_are_new(tmp_path, run, mesh):
    """Another vocabulary, so other embeddings; and one layer's products, which would have fit."""
    patterns = ["embed_head/embed", "embed_head/head", "layers/2/mlp/*"]
    how = [f"checkpoint.resume={run}", "checkpoint.parameters_only=true",
           f"checkpoint.exclude={json.dumps(patterns)}"]  # fmt: skip
    config = load(SMALL, [*mesh, *how, "train.seed=7", "model.vocab_size=320"])
    size = config.parallel.pp * config.parallel.dp * config.parallel.tp
    trainer, said = Trainer.resolve(config, tuple(jax.devices()[:size])), []
    keying = StateKeying(trainer.layout, trainer.sharding)
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying) as checkpoints:
        state, _ = start(trainer, None, checkpoints, said.append)
    assert said[0].endswith("(step 12), but embed_head/embed, embed_head/head, layers/2/mlp/* new")
    got, new = (
        flat(keying.to_keyed(params)) for params in (state.params, trainer.init_parameters())
    )
    old = flat(stored(run, 12)["params"])
    for name, leaf in got.items():
        fresh = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        np.testing.assert_array_equal(leaf, new[name] if fresh else old[name], name)
    assert got["embed_head/head"].shape == (32, 320)


@pytest.mark.parametrize("mesh", [[], ["parallel.pp=2", "parallel.tp=2", "parallel.zero_stage=3"]])
def test_a_whole_state_goes_on_with_new_leaves_and_fresh_moments_of_them(tmp_path, run, mesh):
    excluded = ["embed_head/head", "layers/2/mlp/*"]
    how = [f"checkpoint.resume={run}", f"checkpoint.exclude={json.dumps(excluded)}"]
    config = load(SMALL, [*mesh, *how])
    trainer, said = Trainer.resolve(config), []
    keying = StateKeying(trainer.layout, trainer.sharding)
    data = open_run_data(config, tmp_path, Group())
    with CheckpointStore(tmp_path / "c", keep=1, asynchronous=False, keying=keying) as checkpoints:
        state, seen = start(trainer, data, checkpoints, said.append)
    assert said[0].endswith("but embed_head/head, layers/2/mlp/* new")
    assert (int(state.step), seen.samples) == (12, 12 * 8)
    of = [keying.to_keyed(each.parts()) for each in (state, trainer.init())]
    got, new, old = map(leaves_by_name, (*of, stored(run, 12)))
    fresh = {name for name in got for end in excluded if fnmatch.fnmatch(name, f"*/{end}")}
    assert len(fresh) == 3 * 4  # values and two moments of the head and three products
    for name, leaf in got.items():
        want = new[name] if name in fresh else old[name]
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(want), name)


@pytest.mark.parametrize(
    ("exclude", "more", "sentence"),
    [
        (
            '["embed_head/haed"]',
            [],
            "has 'embed_head/haed', but no parameter is named so: names are embed_head/",
        ),
        (
            '["embed_head/head"]',
            ["model.vocab_size=320"],
            "params/embed_head/embed has shape (256, 32) there",
        ),
        (
            '["embed_head/head"]',
            ["checkpoint.resume=auto"],
            "is not read with checkpoint.resume='auto': it says what to take from the path",
        ),
        (
            "embed_head/head",
            [],
            "checkpoint.exclude: expected a list of strings, got 'embed_head/head': write [",
        ),
    ],
)
def test_what_cannot_be_excluded_is_one_sentence(tmp_path, run, exclude, more, sentence, capsys):
    start = [f"checkpoint.resume={run}", "checkpoint.parameters_only=true"]
    command = [SMALL, f"run.dir={tmp_path}", "train.seed=7", *start]
    assert train.main([*command, f"checkpoint.exclude={exclude}", *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("resume", "sentence"),
    [
        ("nowhere", "nowhere' holds no checkpoint: give 'auto', 'none'"),
        ("{run}/data", "holds no checkpoint"),
        ("{tmp}/cut", "cut is damaged (state/"),
        ("{tmp}/newer", "has format 99 but this jaxpipe reads formats up to 2"),
    ],
)
def test_bad_places_are_one_sentence(tmp_path, run, resume, sentence, capsys):
    for name in ("cut", "newer"):
        shutil.copytree(run / "checkpoints" / "12", tmp_path / name)
    for path in (tmp_path / "cut" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    meta = tmp_path / "newer" / "meta" / "metadata"
    meta.write_text(json.dumps(add_checksum(json.loads(meta.read_text()) | {"format": 99})))
    where = resume.format(run=run, tmp=tmp_path)
    new = tmp_path / "new"
    assert train.main([SMALL, f"run.dir={new}", f"checkpoint.resume={where}"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not list((new / "checkpoints").iterdir())


def test_a_seed_is_made_by_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.processes, "started", lambda: 2)
    assert train.main([SMALL, f"run.dir={tmp_path / 'run'}", "--seed-checkpoint"]) == 2
    assert "--seed-checkpoint in 2 processes: one device makes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_that_jumps_is_reported():
    """The rates of a cosine without warm-up, by hand, 100 and 200 updates long, after 100."""
    plain = ["optimizer.lr=1e-2", "optimizer.min_lr_ratio=0.1", "optimizer.warmup_steps=0"]
    before, longer = (load(SMALL, [*plain, f"train.steps={n}"]) for n in (100, 200))
    meta = {"step": 100, "config": to_toml(before)}
    want = 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * 100 / 199)) / 2)
    said = rate_jump(meta, longer)
    assert f"of step 101 is {want:.2e}, not 1.00e-03 as" in said
    assert said.endswith("train.steps was 100 and is 200")
    assert rate_jump(meta, before) is None
    steady = [*plain, "optimizer.decay=constant"]
    meta = {"step": 100, "config": to_toml(load(SMALL, [*steady, "train.steps=9"]))}
    assert rate_jump(meta, load(SMALL, [*steady, "train.steps=99"])) is None
    said = rate_jump(meta, load(SMALL, [*steady, "optimizer.lr=0.5"]))
    assert "is 5.00e-01, not 1.00e-02" in said
    assert "optimizer.lr was 0.01 and is 0.5" in said
    assert rate_jump({"step": 1}, before) is None  # of another program
