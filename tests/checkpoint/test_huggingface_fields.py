"""Each field of a config.json is understood, known to have no effect, or refused by name."""

from pathlib import Path

import numpy as np
import pytest
from hf_models import (
    GPT2,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    all_tensors,
    assert_same_bytes,
    export,
    random_tensors,
    write_model,
)

from jaxpipe import config as configs
from jaxpipe.checkpoint.__main__ import main
from jaxpipe.checkpoint.hf.parameters import import_huggingface, model_settings
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES
from jaxpipe.model.families import PRESETS
from jaxpipe.model.families.gpt2 import huggingface as gpt2
from jaxpipe.model.published import of_text

TRAIN = {"steps": 1, "microbatch_size": 1, "seq_len": 2}
PUBLISHED = {name: fields for name, fields in PRESETS.items() if not name.startswith("kempner")}
MATTERS = {
    "attention_logit_softcap": 30.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "partial_rotary_scale": -1.0,
    "no_rope_layers_of_the_future": [1, 0], "use_something": True, "compression_config": {"a": 1},
    "mup_width": 256, "layer_scale_init": "small", "is_encoder_decoder": True,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_nobody_knows_is_refused_by_name(name):
    model = configs.build({"model": {"preset": name}, "train": TRAIN}).model
    try:
        form = FAMILIES[model.family].format_of(model)
        written = form.written(model, "bfloat16", model.max_seq_len or 4096)
    except ValueError as error:
        pytest.skip(str(error))
    written["transformers_version"], written["use_cache"], written["pretraining_tp"] = "5", True, 2
    assert model_settings(written, Path())["family"] == model.family
    unknown = {field: value for field, value in MATTERS.items() if field not in written}
    off = dict.fromkeys(unknown) | {"residual_dropout": 0.1, "use_more": False, "more_layers": []}
    model_settings(written | off, Path())
    for field, value in unknown.items():
        with pytest.raises(ConfigError, match=f"has {field}=.*, which is not known here") as caught:
            model_settings(written | {field: value}, Path())
        assert repr(value) in str(caught.value)


NESTED = {
    "architecture BambaForCausalLM but only": {"architectures": "BambaForCausalLM"},
    "has quantization_config=.*'gptq'.* only those of the quant_method 'fp8'": {
        "quantization_config": {"quant_method": "gptq", "bits": 4}
    },
    r"has weight_block_size=\[64, 64\] but this model has only": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}
    },
    "has is_causal=False but": {"is_causal": False},
    "has weight_block_size=None but": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": None}
    },
    "has activation_scheme='static' but": {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}
    },
    "has packing='row' in its quantization_config, which is not known": {
        "quantization_config": {"quant_method": "fp8", "packing": "row"}
    },
    "has quantization_config='fp8' but": {"quantization_config": "fp8"},
    "has wave_factor=2 in its rope_scaling or rope_parameters, which is not known": {
        "rope_parameters": {"rope_type": "default", "wave_factor": 2}
    },
}  # fmt: skip


@pytest.mark.parametrize("message", NESTED)
def test_fields_of_nested_tables_are_refused_by_name(tmp_path, message):
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), **NESTED[message])
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


# Fields of published files that are read nowhere, by preset.
UNREAD = {
    "deepseek_v3": ("ep_size", "auto_map", "num_nextn_predict_layers", "seq_aux", "head_dim"),
    "gpt_oss_20b": ("experts_per_token", "initial_context_length", "output_router_logits"),
    "gpt2": ("n_ctx", "summary_type", "task_specific_params", "reorder_and_upcast_attn"),
    "qwen3_8b": ("max_window_layers", "sliding_window"),
    "llama3_8b": (
        "is_llama_config", "pretraining_tp", "unsloth_version", "_attn_implementation_autoset",
        "top_p",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_fields_of_published_files_without_effect_are_taken(name):
    model = configs.build({"model": {"preset": name}, "train": TRAIN}).model
    form = FAMILIES[model.family].format_of(model)
    written = form.written(model, "bfloat16", model.max_seq_len or 4096)
    changed = model_settings(written | dict.fromkeys(UNREAD[name], 1), Path())
    assert changed == model_settings(written, Path())


@pytest.mark.parametrize("model", [LLAMA, QWEN3, QWEN3_MOE, GPT2], ids=lambda model: model.family)
@pytest.mark.parametrize("names", [None, [], ...])
def test_a_file_without_architectures_is_that_of_its_model_type(tmp_path, model, names):
    tensors = random_tensors(model)
    write_model(tmp_path / "hf", model, tensors, architectures=names)
    step = import_huggingface(tmp_path / "hf", model, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, model, tmp_path / "out")), tensors)


def test_an_import_says_what_it_takes_such_a_file_for(tmp_path, capsys):
    source = write_model(
        tmp_path / "hf", LLAMA, random_tensors(LLAMA), architectures=None, model_type="mistral",
        sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    words = ["import", str(source), "--write-config", str(tmp_path / "run.toml")]
    assert main([*words, "--out", str(tmp_path / "c")]) == 0
    assert "names no architecture: by its model_type it is taken for a Mistral" in (
        capsys.readouterr().out
    )
    assert "sliding_window = 4" in (tmp_path / "run.toml").read_text()


def test_fields_of_a_multimodal_file_rule_over_its_text_model():
    inner = {
        "tie_word_embeddings": True, "eos_token_id": 1, "torch_dtype": "float32", "vocab_size": 64,
        "pad_token_id": None,
    }  # fmt: skip
    outer = {
        "tie_word_embeddings": False, "eos_token_id": [1, 106], "dtype": None, "vocab_size": 32,
        "pad_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    found = of_text(outer | {"text_config": inner})
    ruling = "tie_word_embeddings", "eos_token_id", "pad_token_id", "torch_dtype"
    assert {name: found[name] for name in ruling} == {name: outer[name] for name in ruling}
    assert found["vocab_size"] == 64
    assert of_text({"text_config": inner})["tie_word_embeddings"]


def test_the_context_of_a_gpt2_has_both_of_its_names():
    assert gpt2.written(GPT2, "float32", 64)["n_ctx"] == 64  # converters of other programs read it


@pytest.mark.parametrize("model", [LLAMA, QWEN3, GPT2], ids=lambda model: model.family)
def test_buffers_are_left_out_whatever_their_type(tmp_path, model):
    tensors = random_tensors(model)
    first = "transformer.h.0." if model is GPT2 else "model.layers.0.self_attn."
    buffers = {
        f"{first}attn.masked_bias": np.float64(-1e4), f"{first}rotary_emb.inv_freq": np.float16(1),
        "model.position_ids": np.arange(9), "model.causal_mask": np.ones(4, bool),
        "rotary_emb.cos_cached": np.int8(3),
    }  # fmt: skip
    more = {name: np.atleast_1d(value) for name, value in buffers.items()}
    source = write_model(tmp_path / "hf", model, tensors | more, shards=2)
    step = import_huggingface(source, model, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, model, tmp_path / "out")), tensors)
    source = write_model(tmp_path / "2", model, tensors | {"of_nothing": np.ones(3, np.int64)})
    with pytest.raises(ConfigError, match=r"has no place for \(of_nothing first\)"):
        import_huggingface(source, model, tmp_path / "c2", {})
