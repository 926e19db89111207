"""Directories of checkpoints that are lost, shared with others, or not writable."""

import shutil
from pathlib import Path

import pytest
from checkpoint_states import make_state, open_at

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError


def test_checkpoints_of_another_run_are_not_removed(tmp_path):
    """Those that were there before the run count as its own only if it goes on from them."""
    state, keying = make_state((7,))
    with open_at(tmp_path / "A", keying, keep=2) as first:
        for step in (1, 2):
            first.save(step, state, {"position": 0})
    for other in ("B", "C"):
        shutil.copytree(tmp_path / "A", tmp_path / other)
    with open_at(tmp_path / "A", keying, keep=2) as again:
        again.restore(state, print)
        again.save(3, state, {"position": 0})
    assert list_steps(tmp_path / "A") == [2, 3]
    with open_at(tmp_path / "B", keying, keep=2) as other:
        for step in (3, 4, 5):
            other.save(step, state, {"position": 0})
    assert list_steps(tmp_path / "B") == [1, 2, 4, 5]
    with open_at(tmp_path / "C", keying, keep=2) as swapped:
        swapped.restore(state, print)
        shutil.rmtree(tmp_path / "C" / "2")
        (tmp_path / "B" / "4").rename(tmp_path / "C" / "2")
        for step in (3, 4):
            swapped.save(step, state, {"position": 0})
    assert list_steps(tmp_path / "C") == [2, 3, 4]


def test_nothing_is_written_or_removed_in_a_directory_of_another_start(tmp_path):
    state, keying = make_state((7,))
    is_other = []

    def check():
        if is_other:
            raise SystemExit(2)

    with open_at(tmp_path, keying, keep=1, check_owner=check) as checkpoints:
        checkpoints.save(1, state, {"position": 0})
        checkpoints.wait()
        (tmp_path / "9.orbax-checkpoint-tmp").mkdir()  # which another start is writing
        is_other.append(True)
        with pytest.raises(SystemExit):
            checkpoints.save(2, state, {"position": 0})
        is_other.clear()
        assert (tmp_path / "9.orbax-checkpoint-tmp").exists()
    assert list_steps(tmp_path) == [1]


def test_directory_that_cannot_be_written(tmp_path):
    _, keying = make_state([2, 1])
    file = Path(tmp_path / "file")
    file.touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        open_at(file / "checkpoints", keying)


def test_a_directory_that_is_lost_while_training_stops_nothing(tmp_path):
    state, keying = make_state([2, 1])
    said = []
    with open_at(tmp_path / "saves", keying, say=said.append) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        (tmp_path / "saves").rename(tmp_path / "elsewhere")
        (tmp_path / "saves").touch()  # root could write into a directory that is read-only
        checkpoints.save(2, state, {})
    assert said
    assert all("a checkpoint could not be written" in line for line in said)
    with open_at(tmp_path / "elsewhere", keying) as checkpoints:
        assert checkpoints.restore(state, say=pytest.fail)[1]["step"] == 1


def test_a_directory_that_was_removed_is_made_again(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path / "saves", keying, say=pytest.fail) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "saves")
        checkpoints.save(2, state, {})
        assert checkpoints.is_written(2)
        assert not checkpoints.is_written(1)
