"""A model on disk put on devices."""

from dataclasses import replace

import pytest
from hf_models import LLAMA, random_tensors, write_model

from jaxpipe.config import ConfigError
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.inference.settings import inference_config


def test_the_host_holds_one_parameter_at_a_time(tmp_path):
    saved = SavedModel.open(write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA)))
    asked = []
    watched = replace(saved, read=lambda paths: asked.append(paths) or saved.read(paths))
    LoadedModel.load(watched, inference_config(saved.model, [], rows=1, longest=8))
    names = [{path[2:] if path[0] == "layers" else path for path in paths} for paths in asked]
    assert all(len(together) == 1 for together in names)
    assert sum(map(len, asked)) == len({path for paths in asked for path in paths}) > LLAMA.n_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": "64"}, "has max_position_embeddings='64', no integer"),
        ({"num_attention_heads": 0, "head_dim": ...}, "has a number of heads that is 0"),
        ({"num_key_value_heads": 3}, "describes no model that is possible: .*n_kv_heads=3"),
    ],
)
def test_an_impossible_model_is_not_read(tmp_path, changes, message):
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), **changes)
    with pytest.raises(ConfigError, match=message):
        SavedModel.open(source)
