"""Weights out of a run: streamed in Hugging Face's names, and exported while it trains."""

import errno
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL
from hf_models import all_tensors, export
from saved_runs import saved_run

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.run.exports import Exports
from jaxpipe.train import train
from jaxpipe.training.weights import stream_weights

MESHES = {
    "experts": (
        "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16", "model.qk_norm=true",
        "parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "parallel.zero_stage=3",
    ),
    "uneven": (
        "model.vocab_size=251", "parallel.pp=2", "parallel.tp=2", "parallel.schedule=zbv",
        "model.n_layers=5", "parallel.vocab_parallel_pp=true", "parallel.sequence_parallel=true",
        "optimizer.name=schedule_free", "optimizer.decay=constant",
    ),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.slow(only=["experts"])
@pytest.mark.parametrize("mesh", MESHES)
def test_streamed_weights_are_those_of_an_export(tmp_path, mesh):
    trainer, state, _ = saved_run(tmp_path / "run", *MESHES[mesh])
    streamed = list(stream_weights(trainer, state))
    step = tmp_path / "run" / "checkpoints" / "2"
    written = all_tensors(export(step, trainer.config.model, tmp_path / "out"))
    assert sorted(name for name, _ in streamed) == sorted(written)
    layers = [int(name.split(".")[2]) for name, _ in streamed if ".layers." in name]
    assert layers == sorted(layers)
    for name, array in streamed:
        np.testing.assert_allclose(array, written[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.extended
def test_a_run_exports_while_it_trains(tmp_path, capfd):
    """The same command then exports what is missing, and anew what was trained anew."""
    overrides = [
        f"run.dir={tmp_path}", "parallel.pp=1", "parallel.dp=8", "model.n_layers=2",
        "train.steps=4", "train.eval_every=0", "checkpoint.every=2", "checkpoint.export_every=2",
        "data.source=dummy",
    ]  # fmt: skip
    config = configs.load(SMALL, overrides)
    assert train(config) == 0
    said = capfd.readouterr().out
    for step in (2, 4):
        exported = all_tensors(tmp_path / "exports" / str(step))
        checkpoint = tmp_path / "checkpoints" / str(step)
        expected = all_tensors(export(checkpoint, config.model, tmp_path / f"by-hand-{step}"))
        assert all((exported[name] == expected[name]).all() for name in expected)
        assert f"parameters of step {step} to {tmp_path}/exports/{step}" in said
    shutil.rmtree(tmp_path / "exports" / "2")
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    (tmp_path / "exports" / "4" / "old").touch()
    assert train(config) == 0
    assert (tmp_path / "exports" / "2" / "config.json").exists()
    assert not (tmp_path / "exports" / "4" / "old").exists()


def test_a_checkpoint_that_is_no_longer_kept_is_not_exported(tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    config, said = configs.load(SMALL, [f"run.dir={tmp_path}", "checkpoint.export_every=2"]), []
    with Exports(config, said.append) as exports:
        exports.add(2)
        exports.add(config.train.steps)  # is not saved, and the run ends
    assert len(said) == 1
    assert "step 2 could not be exported (it is no longer kept" in said[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_time_limit_is_of_an_export_that_does_nothing(tmp_path):
    """What the watchdog compares changes while the child works, and not while it waits."""
    words = [f"run.dir={tmp_path}", "checkpoint.export_every=2"]
    exports = Exports(configs.load(SMALL, words), print)
    waits = "import sys; sys.stdin.read(); sum(range(10**7)); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as exports._child:
        time.sleep(0.5)
        before = exports._movement()
        time.sleep(0.2)
        assert exports._movement() == before
        exports._child.stdin.close()
        exports._child.stdout.readline()
        assert exports._movement() != before


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / "exports" / ".2.partial-1").mkdir(parents=True)
    words = [f"run.dir={tmp_path}", "checkpoint.export_every=2", "train.steps=6"]
    with Exports(configs.load(SMALL, words), print):
        assert not (tmp_path / "exports" / ".2.partial-1").exists()


def test_exports_of_steps_that_were_rolled_back_are_removed(tmp_path):
    for step in ("2", "4", "6"):
        (tmp_path / "exports" / step).mkdir(parents=True)
    config = configs.load(SMALL, [f"run.dir={tmp_path}", "checkpoint.export_every=2"])
    Exports(config, print).remove_after(4)
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["2", "4"]


def test_a_disk_that_hesitates_does_not_keep_exports(tmp_path, monkeypatch):
    (tmp_path / "exports" / "6").mkdir(parents=True)
    config = configs.load(SMALL, [f"run.dir={tmp_path}", "checkpoint.export_every=2"])
    errors = iter([OSError(errno.EIO, "Input/output error")])

    def iterdir(path, real=Path.iterdir):
        if error := next(errors, None):
            raise error
        return real(path)

    said = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        Exports(config, said.append).remove_after(4)
    assert not list((tmp_path / "exports").iterdir())
    assert "does not answer" in said[0]


def test_an_export_is_of_a_checkpoint():
    config = configs.load(SMALL, ["checkpoint.every=4", "checkpoint.export_every=6"])
    with pytest.raises(ConfigError, match="export_every=6 must be a multiple of the 4 steps"):
        check_settings(config)


@pytest.mark.parametrize(
    ("overrides", "unmet", "instead"),
    [
        (["family=engram", "ngram_rows=8", "ngram_width=4"], "family 'engram' has no form", ""),
        (["family=qwen3_5", "attention_every=2", "mtp_depth=2"], "mtp_depth=2", "mtp_depth=1"),
        (["family=glm4_moe", "n_experts=8", "mtp_depth=2"], "mtp_depth=2", "mtp_depth=1"),
        (["family=llama4", "n_experts=4", "router_scale=2"], "router_scale=2.0", "router_scale=1"),
    ],
)
def test_an_export_needs_a_model_that_hugging_face_has(overrides, unmet, instead):
    overrides, every = [f"model.{each}" for each in overrides], "checkpoint.every=4"
    exports = [*overrides, every, "checkpoint.export_every=4"]
    with pytest.raises(ConfigError, match=f"export_every=4: .*{unmet}.*leave export_every out"):
        check_settings(configs.load(SMALL, exports))
    check_settings(configs.load(SMALL, [*overrides, every]))
    if instead:
        check_settings(configs.load(SMALL, [*exports, f"model.{instead}"]))
