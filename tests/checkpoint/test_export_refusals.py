"""An export that fails leaves nothing, and one of another model or of no checkpoint is refused."""

import json
import shutil

import pytest
from hf_models import LLAMA, all_tensors, export, imported, random_tensors
from msgspec.structs import replace

from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError


def test_an_export_that_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    step = imported(tmp_path, LLAMA, random_tensors(LLAMA))
    read = StoredCheckpoint.read

    def read_but_the_last_layer(self, paths):
        if ("params", "layers", "2", "attn", "wq") in paths:
            raise OSError(28, "No space left on device")
        return read(self, paths)

    monkeypatch.setattr(StoredCheckpoint, "read", read_but_the_last_layer)
    with pytest.raises(ConfigError, match="out cannot be written .No space left on device"):
        export(step, LLAMA, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "hf"]


def test_an_export_overwrites_nothing(tmp_path):
    step = imported(tmp_path, LLAMA, random_tensors(LLAMA))
    source = tmp_path / "hf"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ConfigError, match="not an empty directory"):
        export(step, LLAMA, source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert all_tensors(export(step, LLAMA, tmp_path / "empty"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 2}, r"params/layers/2/attn/wk has shape \(32, 16\) there and none"),
        ({"n_layers": 4}, r"params/layers/3/attn/wk has shape none \(absent\) there"),
        ({"d_ff": 50}, r"mlp/w_down has shape \(48, 32\) there and \(50, 32\)"),
        ({"tie_embeddings": True}, r"params/embed_head/head has shape \(32, 64\) there and none"),
    ],
)
def test_an_export_as_another_model_is_refused(tmp_path, change, message):
    step = imported(tmp_path, LLAMA, random_tensors(LLAMA))
    with pytest.raises(ConfigError, match=message):
        export(step, replace(LLAMA, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_of_this_version_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="is not a checkpoint of jaxpipe"):
            StoredCheckpoint(path)
    step = imported(tmp_path, LLAMA, random_tensors(LLAMA))
    unfinished = step.with_name("5.orbax-checkpoint-tmp")
    shutil.copytree(step, unfinished)
    with pytest.raises(ConfigError, match="is not a checkpoint .*not a complete checkpoint"):
        StoredCheckpoint(unfinished)
    meta = step / "meta" / "metadata"
    meta.write_text("{")
    with pytest.raises(ConfigError, match="0 is damaged .*: take an earlier one"):
        StoredCheckpoint(step)
    meta.write_text(json.dumps({"format": 99, "step": 0}))
    with pytest.raises(ConfigError, match="has format 99 but this jaxpipe reads formats up to 2"):
        StoredCheckpoint(step)
    meta.write_text("{}")
    with pytest.raises(ConfigError, match="its metadata names no format"):
        StoredCheckpoint(step)
