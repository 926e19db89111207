"""Local saves: pieces of a state, from which it is restored on any mesh."""

import errno
import shutil

import jax
import numpy as np
import pytest
from commands import SMALL, losses

from jaxpipe import train
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.exclusion import leaves_by_name
from jaxpipe.checkpoint.local.saves import LocalSaves, neighbour_of, run_word
from jaxpipe.config import ConfigError, load
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.runtime.file_server import NotReachedError
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

VOCABULARY = "model.vocab_size=251"
COARSE = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", VOCABULARY]
FINER = ["parallel.pp=1", "parallel.dp=4", "parallel.tp=2", "parallel.zero_stage=3", VOCABULARY]


class Run:
    """The state of a run on a mesh, and its local saves."""

    def __init__(self, folder, *overrides):
        config = load(SMALL, ["train.eval_every=0", *overrides])
        self.trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
        self.keying = StateKeying(self.trainer.layout, self.trainer.sharding)
        self.said, self.saves = [], LocalSaves(folder, "run", Group())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.saves.close(self.said.append)

    def save(self, step, state):
        self.saves.save(step, self.keying.to_keyed(state.parts()), {"step": step}, self.said.append)

    def restore(self, since=0):
        like = self.trainer.state_shapes.parts()
        return self.saves.restore(since, self.keying, like, self.said.append, None)

    def values(self, parts):
        keyed = leaves_by_name(self.keying.to_keyed(parts))
        return {name: np.asarray(leaf) for name, leaf in keyed.items()}


def folders(tmp_path):
    return sorted(path.name.split("-")[0] for path in tmp_path.glob("run/*/*"))


def test_a_state_is_restored_on_another_mesh(tmp_path):
    """Restored shards begin inside those that are saved, and the vocabulary is padded."""
    with Run(tmp_path, *COARSE) as run:
        state = run.trainer.init()
        want = run.values(state.parts())
        run.save(3, state)
    with Run(tmp_path, *FINER) as other:
        assert other.restore(since=4) is None
        parts, meta = other.restore()
        got = other.values(parts)
        shapes = other.trainer.state_shapes.parts()
    assert meta["step"] == 3
    assert other.said == ["step 3 is restored from local saves"]
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    placed = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), parts)
    assert placed == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("any"), "parallel.pp=1", "parallel.dp=2") as run:
        yield run, run.trainer.init()


def restart(run, folder):
    run.saves.close(run.said.append)
    run.saves = LocalSaves(folder, "run", Group())
    run.said.clear()


def test_saves_stay_until_the_next_is_complete(small, tmp_path):
    run, state = small
    restart(run, tmp_path)
    for step in (2, 4):
        run.save(step, state)
    run.saves._pending[1].result()
    assert folders(tmp_path) == ["2", "4"]
    run.saves.wait(run.said.append)
    assert folders(tmp_path) == ["4"]
    restart(run, tmp_path)  # goes back to step 1: the save of step 4 is of another history
    run.save(2, state)
    run.saves.wait(run.said.append)
    assert folders(tmp_path) == ["2"]
    run.saves.clear(run.said.append)
    assert folders(tmp_path) == []


def test_damage_is_found(small, tmp_path):
    run, state = small
    restart(run, tmp_path)
    run.save(5, state)
    restart(run, tmp_path)
    (piece,) = tmp_path.glob("run/0/5-*/0.bin")
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(data)
    assert run.restore() is None
    assert "0.bin is not as it was written) is not used" in run.said[0]


@pytest.mark.parametrize("missing", ["0.json", "another"])
def test_a_save_without_a_piece_does_not_count(small, tmp_path, missing):
    run, state = small
    restart(run, tmp_path)
    run.save(5, state)
    restart(run, tmp_path)
    (save,) = tmp_path.glob("run/0/5-*")
    if missing == "another":  # of two processes
        save.rename(save.with_name(save.name.removesuffix("1") + "2"))
    else:
        (save / missing).unlink()
    assert run.restore() is None
    if missing == "another":
        reason = "no host of this run has the pieces of process 1"
        assert run.said == [f"the local save of step 5 is not used: {reason}"]


def test_a_disk_that_is_full_is_reported_once(small, tmp_path, monkeypatch):
    run, state = small
    restart(run, tmp_path)
    run.save(5, state)

    def fail(*_):
        raise OSError("no space")

    run.saves.wait(run.said.append)
    monkeypatch.setattr("jaxpipe.checkpoint.local.saves.write_piece", fail)
    for step in (6, 7):
        run.save(step, state)
        run.saves.wait(run.said.append)
    (warning,) = run.said
    assert "the local save of step 6 failed (no space)" in warning
    assert folders(tmp_path) == ["5"]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (OSError(errno.ENOSPC, "No space left"), "; make room in checkpoint.local_dir."),
        (PermissionError(errno.EACCES, "denied"), "; make checkpoint.local_dir writable."),
        (NotReachedError("b:1 does not answer"), "; let the hosts reach each other."),
        (MemoryError("none"), "the one before it stays."),
    ],
)
def test_a_failure_is_reported_with_its_remedy(small, tmp_path, monkeypatch, error, end):
    run, state = small
    restart(run, tmp_path)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("jaxpipe.checkpoint.local.saves.write_piece", fail)
        run.save(6, state)
        run.saves.wait(run.said.append)
    (warning,) = run.said
    assert warning.endswith(end)


@pytest.mark.extended
def test_a_run_goes_on_from_a_local_save(tmp_path, monkeypatch, capsys):
    """The save in run.dir of step 4 is lost; that of step 2 is older."""
    run, folder = tmp_path / "run", tmp_path / "local"
    command = [
        str(SMALL), f"run.dir={run}", "train.eval_every=0", "optimizer.decay=constant",
        "checkpoint.every=2", "checkpoint.local_every=2", f"checkpoint.local_dir={folder}",
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "clear_local", lambda _: None)
        assert train.main([*command, "train.steps=5"]) == 0
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / str(step))
    before = losses(run)
    assert train.main([*command, "train.steps=5"]) == 0
    assert "resumed from step 4" in capsys.readouterr().out
    assert losses(run) == before
    assert not list(folder.glob("*/*/*"))


def test_a_copy_of_a_run_has_a_word_of_its_own(tmp_path):
    (tmp_path / "one").mkdir()
    word = run_word(tmp_path / "one", Group())
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert run_word(tmp_path / "two", Group()) != word == run_word(tmp_path / "one", Group())
    (tmp_path / "one" / "local_saves").write_text(word)  # as earlier versions wrote it
    assert run_word(tmp_path / "one", Group()) == word


def test_a_folder_must_be_writable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="checkpoint.local_dir=.* cannot be written .Not a dir"):
        LocalSaves(tmp_path / "file", "run", Group())


@pytest.mark.parametrize("setting", ["local_every=2", "local_dir=folder"])
def test_an_interval_and_a_folder_need_each_other(setting):
    with pytest.raises(ConfigError, match="checkpoint.local_.* but checkpoint.local_"):
        check_settings(load(SMALL, [f"checkpoint.{setting}"]))


def test_copies_are_on_the_next_host():
    assert [neighbour_of(i, ["a", "b", "b", "c"]) for i in range(4)] == [1, 3, 3, 0]
    assert neighbour_of(1, ["a", "a"]) is None
