"""The configuration with which a trained model is used."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpipe import config as configs
from jaxpipe.inference import generation
from jaxpipe.inference.generation import CachedModel
from jaxpipe.inference.settings import inference_config

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = ["llama3_8b_pp4", "gpt_oss_20b_pp2_ep4", "deepseek_v2_lite_pp2_ep4"]


@pytest.mark.parametrize("file", FILES)
def test_a_model_trained_with_cudnn_is_used_in_every_dtype(file):
    """Its kernel takes no float32, in which models are used unless told otherwise."""
    trained = configs.load(CONFIGS / f"{file}.toml", ["model.attention=cudnn"]).model
    assert inference_config(trained, [], rows=1, longest=8).model.attention == "xla"
    told = ["model.attention=cudnn", "train.compute_dtype=bfloat16"]
    assert inference_config(trained, told, rows=1, longest=8).model.attention == "cudnn"


@pytest.mark.parametrize("file", FILES)
def test_tokens_are_generated_without_cudnn(file, monkeypatch):
    """Its kernel does not take a token and those before it where attention has sinks."""
    made = []
    monkeypatch.setattr(generation, "model_of", lambda config, grouped: made.append(config))
    config = configs.load(CONFIGS / f"{file}.toml", ["model.attention=cudnn"])
    trainer = SimpleNamespace(config=config, grouped=None)
    assert CachedModel(trainer, None, tokens=16).model is None
    assert (made[0].model.attention, made[0].parallel.slices) == ("xla", 16)
    assert made[0].model.n_layers == config.model.n_layers
