"""DeepSeek models against transformers: logits, files both ways, and what neither can express.

Every gradient is compared in `test_recorded.py`.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import all_tensors, assert_same_bytes, our_logits, stored_params, stored_variables
from msgspec.structs import replace
from safetensors.numpy import save_file

from jaxpipe.checkpoint.hf.parameters import export_huggingface, import_huggingface, model_settings
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError
from jaxpipe.model.families.deepseek import huggingface
from jaxpipe.model.families.deepseek.config import DeepseekConfig

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_SIZES = {
    "num_hidden_layers": 3, "hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 56,
    "vocab_size": 96, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5,
}  # fmt: skip
MODELS = {
    "v3": ("DeepseekV3", _SIZES | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "rope_parameters": _YARN, "num_key_value_heads": 4,
    }),
    "kimi": ("DeepseekV3", _SIZES | {
        "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "routed_scaling_factor": 2.827, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }),
    # Rows are longer than the keys that a query attends to. With many index heads no two scores
    # are equal, which happens where all heads' products are negative.
    "v32": ("DeepseekV32", _SIZES | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "rope_parameters": _YARN, "num_key_value_heads": 4, "index_topk": 7, "index_n_heads": 16,
        "index_head_dim": 12,
    }),
    "glm5": ("GlmMoeDsa", _SIZES | {
        "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "num_key_value_heads": 4, "index_topk": 7, "index_n_heads": 16, "index_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }),
    # Layers that choose keys: 0, 1 and 3.
    "glm52": ("GlmMoeDsa", _SIZES | {
        "num_hidden_layers": 5, "q_lora_rank": 24, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "num_key_value_heads": 4, "index_topk": 7, "index_n_heads": 16,
        "index_head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "indexer_types": ["full", "full", "shared", "full", "shared"],
    }),
    "v2": ("DeepseekV2", _SIZES | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0, "rope_parameters": _YARN | {"mscale_all_dim": 0.707},
    }),
    "v2_lite": ("DeepseekV2", _SIZES | {"q_lora_rank": None, "rope_parameters": _YARN}),
}  # fmt: skip


def made_by_transformers(name):
    """Return a random model whose gains are not one and whose biases change the choice."""
    family, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.uniform_(0.5, 1.5)
            if "correction_bias" in key:
                tensor.uniform_(-0.3, 0.3)
    return model


def our_model(theirs, place):
    """Return `[model]` of what transformers' configuration describes."""
    fields = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    return DeepseekConfig(**model_settings(fields, place))


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def export(step, model, target, **options):
    options = {"dtype": "float32", "max_positions": 64, "max_shard_bytes": 10**9} | options
    export_huggingface(StoredCheckpoint(step), model, target, serving=ServingFiles(), **options)


@pytest.mark.slow(unless=["experts apart-v3*", "experts fused-v2", "experts apart-v2_lite"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["experts apart", "experts fused"])
def test_logits_and_files(tmp_path, name, form):
    """The same logits; transformers reads what is exported, bit for bit."""
    theirs = made_by_transformers(name)
    theirs.save_pretrained(tmp_path / "hf", save_original_format=form == "experts apart")
    model = our_model(theirs, tmp_path)
    assert not list(model.broken_rules(tp=2))
    assert model.parameter_count() == sum(tensor.numel() for tensor in theirs.parameters())
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    want = logits_of(theirs, tokens)
    step = import_huggingface(tmp_path / "hf", model, tmp_path / "c", {})
    found = our_logits(model, stored_params(step), tokens, stored_variables(step))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    export(step, model, tmp_path / "out", max_shard_bytes=40_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(logits_of(again, tokens), want)
    if form == "experts apart":
        assert_same_bytes(all_tensors(tmp_path / "out"), all_tensors(tmp_path / "hf"))


def test_published_files_in_8_bit_floats(tmp_path):
    """Matrices in e4m3 with scales become their products; vectors, router and ends stay."""
    theirs = made_by_transformers("v3")
    theirs.save_pretrained(tmp_path / "hf")
    model, name = our_model(theirs, tmp_path), "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors = all_tensors(tmp_path / "hf")
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.array([[1.5]], np.float32)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    path = tmp_path / "hf" / "config.json"
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))
    step = import_huggingface(tmp_path / "hf", model, tmp_path / "c", {})
    found = stored_params(step)["layers"]["1"]["moe"]["experts"]["w_down"][5]
    np.testing.assert_array_equal(found, 1.5 * tensors[name].astype(np.float32).T)


CHANGES = {
    "rope_interleave=False but": {"rope_interleave": False},
    "scoring_func='softmax' but": {"scoring_func": "softmax"},
    "has quantization_config=.*'awq'.* only those of the quant_method 'fp8'": {
        "quantization_config": {"quant_method": "awq"}
    },
    "moe_layer_freq=2 but": {"moe_layer_freq": 2},
    r"has indexers in the layers \[0, 2, 5\] alone": {
        "architectures": [huggingface.GLM], "num_hidden_layers": 6,
        "indexer_types": ["full", "shared", "full", "shared", "shared", "full"],
    },
    "index_topk_freq=4 but": {"index_topk_freq": 4},
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_what_the_family_lacks_is_refused(tmp_path, message):
    fields = MODELS["v3"][1] | {"architectures": ["DeepseekV3ForCausalLM"]} | CHANGES[message]
    with pytest.raises(ConfigError, match=message):
        model_settings(fields, tmp_path)


def test_what_transformers_lacks_is_not_written():
    v3 = DeepseekConfig(**model_settings(
        MODELS["v3"][1] | {"architectures": ["DeepseekV3ForCausalLM"]}, "d"
    ))  # fmt: skip
    for fields, message in (
        ({"router_bias": False}, "model.router_bias=False, but models with model.router_score"),
        ({"shared_experts": 0}, "both kinds of experts"),
        ({"router_score": "softmax"}, "model.norm_topk_prob=True, but"),
        ({"moe_every": 2}, "model.moe_every=2, but"),
    ):
        with pytest.raises(ValueError, match=message):
            huggingface.written(replace(v3, **fields), "float32", 64)


def test_the_balance_loss_of_a_sequence_has_deepseeks_weight():
    fields = MODELS["v3"][1] | {"architectures": ["DeepseekV3ForCausalLM"]}
    model = DeepseekConfig(**model_settings(fields, "d"))
    assert huggingface.trained(fields, model) == {}
    given = fields | {"seq_aux": True, "aux_loss_alpha": 1e-4}
    assert huggingface.trained(given, model) == {"router_aux_loss": 1e-4}
    written = huggingface.written(replace(model, router_aux_loss=1e-4), "float32", 64)
    assert huggingface.trained(written, model) == {"router_aux_loss": 1e-4}
