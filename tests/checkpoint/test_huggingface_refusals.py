"""A checkpoint of another model, or an incomplete one, is refused with one sentence."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hf_models import (
    GPT2,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    all_tensors,
    assert_same_bytes,
    export,
    imported,
    random_tensors,
    write_model,
)
from msgspec.structs import replace
from safetensors.numpy import save_file

from jaxpipe.checkpoint.hf.parameters import import_huggingface
from jaxpipe.checkpoint.hf.streaming import LazyArray, save_parameters
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.gpt2 import huggingface as gpt2

CONFIG_CHANGES = {
    "n_layers is 4 there and 3 here; set model.n_layers=4": {"num_hidden_layers": 4},
    "n_kv_heads is 4 there and 2 here; set model.n_kv_heads=4": {"num_key_value_heads": 4},
    "head_dim is 16 there and 8 here": {"head_dim": 16},
    "d_ff is 49 there and 48 here, norm_eps is 1e-06 there and 1e-05 here; set model.d_ff=49 "
    "model.norm_eps=1e-06": {"intermediate_size": 49, "rms_norm_eps": 1e-6},
    "rope_theta is 5.0 there and 10000.0 here": {"rope_theta": 5.0},
    "rope_theta is 6.0 there": {"rope_parameters": {"rope_type": "default", "rope_theta": 6.0}},
    "qk_norm is true there and false here": {"architectures": ["Qwen3ForCausalLM"]},
    "tie_embeddings is true there and false here": {"tie_word_embeddings": True},
    "rope_factor is 8.0 there and 1.0 here, rope_low_freq_factor is 2.0 there": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "has rope_parameters=.* and rope_scaling=.*, which differ: put all fields into one": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "has no num_hidden_layers, which has no default": {"num_hidden_layers": None},
    "scales its rotary positions .rope_type 'su'": {"rope_scaling": {"type": "su"}},
    "has no factor in its rope_scaling of the type 'linear'": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}
    },
    'rope_scaling is "yarn" there and "llama3" here, rope_factor is 4.0 there': {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "attention_bias=True but": {"attention_bias": True},
    "mlp_bias=True but": {"mlp_bias": True},
    "hidden_act='gelu' but": {"hidden_act": "gelu"},
    "use_sliding_window=True but": {"use_sliding_window": True},
    "sliding_window is 4096 there and 0 here; set model.sliding_window=4096": {
        "architectures": ["MistralForCausalLM"]
    },
    "has layers of full_attention but all of this model's are of sliding_attention": {
        "architectures": ["MistralForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "layers of sliding_attention": {"layer_types": ["full_attention", "sliding_attention"]},
    "quantization_config=": {"quantization_config": {"bits": 4}},
    "n_experts is 128 there and 0 here, experts_per_token is 8 there and 1 here, d_expert is 768": {
        "architectures": ["Qwen3MoeForCausalLM"]
    },
    "has mlp_only_layers=.2. but of this model's layers only the first": {
        "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [2],
    },
    "architecture FalconForCausalLM but only": {"architectures": ["FalconForCausalLM"]},
    "router_jitter_noise=0.1 but": {
        "architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.1
    },
    "architecture None but only": {"architectures": None, "model_type": "falcon"},
    "has no hidden_size": {"hidden_size": ...},
    "has vocab_size='96', no integer": {"vocab_size": "96"},
    r"scales rotary positions by \[1\], no table": {"rope_scaling": [1]},
    r"has text_config=\[1\], which is no table": {"text_config": [1]},
}  # fmt: skip


@pytest.mark.parametrize("message", CONFIG_CHANGES)
def test_another_model_is_refused_by_its_config(tmp_path, message):
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), **CONFIG_CHANGES[message])
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_a_mistral_without_a_window_is_a_llama(tmp_path):
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), **changes)
    step = import_huggingface(source, LLAMA, tmp_path / "c", {})
    out = export(step, LLAMA, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert_same_bytes(all_tensors(out), random_tensors(LLAMA))


def test_a_dense_file_is_not_for_a_sparse_model(tmp_path):
    source = write_model(tmp_path / "hf", QWEN3, random_tensors(QWEN3))
    sparse = replace(QWEN3, n_experts=4, experts_per_token=2)
    with pytest.raises(
        ConfigError, match=r"n_experts is 0 there and 4 here; set model.n_experts=0"
    ):
        import_huggingface(source, sparse, tmp_path / "c", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_score": "sigmoid"}, 'router_score is "softmax" there and "sigmoid" here'),
        ({"shared_experts": 1}, "shared_experts is 0 there and 1 here"),
        ({"norm_topk_prob": False}, "norm_topk_prob is true there and false here"),
        ({"first_dense_layers": 0}, "first_dense_layers is 2 there and 0 here"),
    ],
)
def test_other_experts_are_neither_read_nor_written(tmp_path, changes, message):
    step = imported(tmp_path, QWEN3_MOE, random_tensors(QWEN3_MOE))
    other = replace(QWEN3_MOE, **changes)
    with pytest.raises(ConfigError, match=message):
        import_huggingface(tmp_path / "hf", other, tmp_path / "c2", {})
    if {*changes} & {"router_score", "shared_experts"}:
        with pytest.raises(ConfigError, match="the experts of Qwen3-MoE have only"):
            export(step, other, tmp_path / "out")


def test_experts_that_are_one_parameter_have_one_dtype(tmp_path):
    tensors = random_tensors(QWEN3_MOE)
    name = "model.layers.3.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    source = write_model(tmp_path / "hf", QWEN3_MOE, tensors)
    with pytest.raises(
        ConfigError, match=f"{name} in float16 but .*experts.0.up_proj.weight in fl"
    ):
        import_huggingface(source, QWEN3_MOE, tmp_path / "c", {})


GPT2_CHANGES = {
    "max_seq_len is 128 there and 64 here; set model.max_seq_len=128": {"n_positions": 128},
    "d_ff is 128 there and 48 here": {"n_inner": None},
    "activation_function='gelu' but this model has only activation_function='gelu_new'": {
        "activation_function": "gelu"
    },
    "scale_attn_by_inverse_layer_idx=True but": {"scale_attn_by_inverse_layer_idx": True},
    "tie_word_embeddings=False but": {"tie_word_embeddings": False},
    "architecture GPTBigCodeForCausalLM but only GPT2LMHeadModel can be imported": {
        "architectures": ["GPTBigCodeForCausalLM"]
    },
}


@pytest.mark.parametrize("message", GPT2_CHANGES)
def test_another_gpt2_is_refused_by_its_config(tmp_path, message):
    source = write_model(tmp_path / "hf", GPT2, random_tensors(GPT2), **GPT2_CHANGES[message])
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, GPT2, tmp_path / "c", {})


def test_what_transformers_cannot_describe_is_not_exported(tmp_path):
    step = imported(tmp_path, GPT2, random_tensors(GPT2))
    with pytest.raises(ConfigError, match="--max-positions 32 but the model has learned 64"):
        export(step, GPT2, tmp_path / "out", max_positions=32)
    wide = replace(GPT2, n_heads=4, head_dim=16)
    both = replace(QWEN3, sliding_window=4)
    with pytest.raises(ValueError, match="qk_norm=True, .*sliding_window=4, .*no model with these"):
        FAMILIES["llama"].format_of(both)
    with pytest.raises(ValueError, match="has no other heads: it cannot be exported"):
        gpt2.written(wide, "float32", 64)
    assert not (tmp_path / "out").exists()


def test_fields_that_both_versions_of_transformers_leave_out_have_its_defaults(tmp_path):
    model = replace(LLAMA, n_kv_heads=4, norm_eps=1e-6)
    absent = dict.fromkeys(
        ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"],
        ...,
    )
    modern = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    for name, changes in {"old": absent, "new": {"rope_theta": ...} | modern}.items():
        source = write_model(tmp_path / name, model, random_tensors(model), **changes)
        import_huggingface(source, model, tmp_path / f"{name}-c", {})


def without(name, tensors):
    return {key: tensor for key, tensor in tensors.items() if key != name}


GATE = "model.layers.1.mlp.gate_proj.weight"
TENSOR_CHANGES = {
    f"has no tensor {GATE}": lambda tensors: without(GATE, tensors),
    r"has 1 tensors that the model has no place for \(model.layers.3.x first\)": lambda tensors: (
        tensors | {"model.layers.3.x": np.ones(3, np.float32)}
    ),
    rf"has {GATE} of shape \(32, 48\) but its config.json describes \(48, 32\)": lambda tensors: (
        tensors | {GATE: np.ascontiguousarray(tensors[GATE].T)}
    ),
    f"holds {GATE} as I8 but only F32, F16, BF16": lambda tensors: (
        tensors | {GATE: tensors[GATE].astype(np.int8)}
    ),
}


@pytest.mark.parametrize("message", TENSOR_CHANGES)
def test_tensors_that_are_not_the_models_are_named(tmp_path, message):
    tensors = TENSOR_CHANGES[message](random_tensors(LLAMA))
    source = write_model(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_a_tied_head_may_be_held_twice_but_not_differ(tmp_path):
    tensors = random_tensors(QWEN3)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    step = import_huggingface(write_model(tmp_path / "1", QWEN3, twice), QWEN3, tmp_path / "c1", {})
    assert_same_bytes(all_tensors(export(step, QWEN3, tmp_path / "out")), tensors)
    bare = {name.removeprefix("model."): tensor for name, tensor in twice.items()}
    source = write_model(tmp_path / "bare", QWEN3, bare)
    step = import_huggingface(source, QWEN3, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, QWEN3, tmp_path / "out2")), tensors)
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    source = write_model(tmp_path / "2", QWEN3, other)
    with pytest.raises(ConfigError, match="lm_head.weight that differs from model.embed_tokens"):
        import_huggingface(source, QWEN3, tmp_path / "c2", {})


def cut_short(directory):
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


FILE_DAMAGE = {
    "lacks 1 of the 3 shards that its index lists .model-00002-of-00003.safetensors first": (
        lambda d: (d / "model-00002-of-00003.safetensors").unlink()
    ),
    "model-00002-of-00003.safetensors is damaged": cut_short,
    "model.safetensors.index.json is not an index": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}")
    ),
    "lists .* in model-00003-of-00003.safetensors, which does not hold it": (
        lambda d: save_file({"x": np.ones(1, np.float32)}, d / "model-00003-of-00003.safetensors")
    ),
    "has neither model.safetensors nor model.safetensors.index.json": (
        lambda d: (d / "model.safetensors.index.json").unlink()
    ),
    r"has neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin": (
        lambda d: [path.unlink() for path in d.glob("model*")] and (d / "pytorch_model.bin").touch()
    ),
    "has adapter_config.json, by which transformers adds an adapter": (
        lambda d: (d / "adapter_config.json").write_text("{}")
    ),
    "has no config.json": lambda d: (d / "config.json").unlink(),
    "config.json cannot be read": lambda d: (d / "config.json").write_text("{"),
}


@pytest.mark.parametrize("message", FILE_DAMAGE)
def test_half_a_set_of_files_is_refused(tmp_path, message):
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), shards=3)
    FILE_DAMAGE[message](source)
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_a_model_that_no_run_takes_is_not_imported(tmp_path):
    dense = replace(QWEN3_MOE, first_dense_layers=QWEN3_MOE.n_layers)
    source = write_model(tmp_path / "hf", dense, {})
    with pytest.raises(ConfigError, match="describes a model that no run takes: .*dense"):
        import_huggingface(source, dense, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_an_import_that_fails_midway_leaves_no_checkpoint_and_can_be_repeated(tmp_path):
    def fail():
        raise OSError(5, "Input/output error")

    good = LazyArray((2,), np.dtype(np.float32), lambda: np.ones(2, np.float32))
    bad = LazyArray((2,), np.dtype(np.float32), fail)
    with pytest.raises(ConfigError, match="cannot be written .*Input/output error"):
        save_parameters(tmp_path / "c", {"a": good, "b": bad}, {})
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        assert manager.all_steps() == []
    assert save_parameters(tmp_path / "c", {"a": good}, {}) == tmp_path / "c" / "0"
    with pytest.raises(ConfigError, match=r"holds checkpoints of steps \[0\] already"):
        save_parameters(tmp_path / "c", {"a": good}, {})
