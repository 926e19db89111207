"""The text models of transformers' multimodal models: logits, and what an import leaves out."""

from pathlib import Path

import numpy as np
import pytest
from hf_models import all_tensors, assert_same_bytes, our_logits, stored_params

from jaxpipe import config as configs
from jaxpipe.checkpoint.__main__ import main
from jaxpipe.checkpoint.hf.parameters import model_settings, read_config
from jaxpipe.inference.saved_model import SavedModel

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_TEXT = {
    "num_hidden_layers": 3, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 24, "vocab_size": 96, "initializer_range": 0.2,
    "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_IMAGES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
MODELS = {
    "Llama4": (
        _TEXT | {"intermediate_size_mlp": 56, "num_local_experts": 4, "attention_chunk_size": 8},
        _IMAGES | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "Gemma3": (_TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 12}, _IMAGES),
}


def test_a_published_file_without_its_longest_context_has_that_of_transformers():
    text = {**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 12}
    del text["max_position_embeddings"]
    theirs = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    longest = model_settings(theirs, Path())["max_seq_len"]
    assert longest == transformers.Gemma3TextConfig().max_position_embeddings


CONFIGS = [
    "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma3Text", "Gemma3", "GptOss",
    "Llama4Text", "Llama4", "DeepseekV2", "DeepseekV3", "GPT2",
]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_transformers_is_known(name):
    """The file has no architectures, which transformers writes only with weights."""
    own = {"num_experts_per_tok": 6} if name == "DeepseekV2" else {}
    theirs = getattr(transformers, f"{name}Config")(**own).to_dict()
    assert theirs["architectures"] is None
    settings = model_settings(theirs, Path())
    text = theirs.get("text_config") or theirs
    layers = text.get("num_hidden_layers") or text["n_layer"]
    assert settings["n_layers"] == layers


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_the_outer_flag_says_whether_the_head_is_tied(tmp_path, inner, outer):
    text = MODELS["Gemma3"][0] | {"tie_word_embeddings": inner}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=_IMAGES, tie_word_embeddings=outer
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path)
    tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert model_settings(read_config(tmp_path), tmp_path).get("tie_embeddings", True) == tied
    SavedModel.open(tmp_path)


@pytest.mark.slow(only=["Llama4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_model_is_imported(tmp_path, name, capsys):
    text, images = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=images)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    toml = tmp_path / "run.toml"
    words = ["import", str(tmp_path / "hf"), "--write-config", str(toml)]
    assert main([*words, "--out", str(tmp_path / "c")]) == 0
    stored = all_tensors(tmp_path / "hf")
    of_text = {
        key.removeprefix("language_model."): tensor
        for key, tensor in stored.items()
        if key.startswith("language_model.")
    }
    left_out = sorted(stored.keys() - {f"language_model.{key}" for key in of_text})
    sentence = f"left out {len(left_out)} tensors that are not of this model ({left_out[0]} first)"
    assert sentence in capsys.readouterr().out
    model, tokens = configs.load(toml, []).model, np.random.default_rng(0).integers(3, 96, (2, 20))
    text_model = theirs.language_model if name == "Llama4" else theirs
    with torch.no_grad():
        want = text_model(torch.from_numpy(tokens)).logits.numpy()
    found = our_logits(model, stored_params(tmp_path / "c" / "0"), tokens)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert main(["export", str(tmp_path / "c" / "0"), str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == f"{name}ForCausalLM"
    assert_same_bytes(all_tensors(tmp_path / "out"), of_text)
