"""Which checkpoints a run may remove: those that it is known to have saved."""

import errno
from types import SimpleNamespace

import pytest

from jaxpipe.checkpoint import retention
from jaxpipe.checkpoint.integrity import add_checksum
from jaxpipe.checkpoint.retention import LINEAGE, Retention
from jaxpipe.runtime.group import Group


def removed(kept, steps):
    kept.note_foreign(steps, Group())
    infos = [SimpleNamespace(step=step) for step in [*steps, max(steps) + 1]]
    stays = kept.should_preserve(infos, context=None)
    return [info.step for info, stay in zip(infos, stays) if not stay]


@pytest.fixture
def saved(tmp_path):
    """Checkpoints 1 to 3, of which 2 is another run's."""
    for step, word in ((1, "own"), (2, "other"), (3, "own")):
        folder = tmp_path / str(step) / "meta"
        folder.mkdir(parents=True)
        meta = add_checksum({"format": 2, LINEAGE: word})
        (folder / "metadata").write_text(retention.json.dumps(meta))
    return Retention(tmp_path, 2, 0, "own")


def test_a_checkpoint_of_another_run_stays(saved):
    assert removed(saved, [1, 2, 3]) == [1]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_one_that_cannot_be_read_now_is_removed_after_a_later_save(saved, monkeypatch, code):
    """It was taken for another run's, and stayed for ever."""
    read = retention.read_meta

    def fail(checkpoint):
        raise OSError(code, "no answer", str(checkpoint))

    monkeypatch.setattr(retention, "read_meta", fail)
    assert removed(saved, [1, 2, 3]) == []
    monkeypatch.setattr(retention, "read_meta", read)
    assert removed(saved, [1, 2, 3]) == [1]
