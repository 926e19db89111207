"""Kimi Linear beside transformers: published files, greedy text, sizes, and what is refused.

Logits and exports are compared in `tests/checkpoint`, gradients in `test_relatives.py`.
"""

import json

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from jaxpipe.checkpoint.hf.parameters import model_settings, open_tensors
from jaxpipe.config import ConfigError
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.inference.settings import inference_config
from jaxpipe.model import PRESETS
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.kimi_linear.huggingface import written

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from inference.test_generate import GREEDY, greedy  # noqa: E402

ATTENTION = [4, 8, 12, 16, 20, 24, 27]
# As the published file describes the model, without what changes no number.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
    "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": ATTENTION, "head_dim": 128, "num_heads": 32,
        "kda_layers": [i for i in range(1, 28) if i not in ATTENTION],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
    "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
TINY = KimiLinearConfig(
    n_layers=5, d_model=40, n_heads=4, d_ff=48, vocab_size=96, max_seq_len=512, kv_lora_rank=20,
    qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12, attention_every=3, delta_heads=2,
    delta_head_dim=12, delta_chunk=8, n_experts=4, experts_per_token=2, d_expert=24,
    router_scale=2.446,
)  # fmt: skip


def made_by_transformers(directory):
    """Save a random model, and return it."""
    torch.manual_seed(0)
    fields = written(TINY, "float32", 512) | {"initializer_range": 0.2}
    theirs = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig.from_dict(fields))
    theirs.save_pretrained(directory)
    return theirs.eval()


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(tmp_path):
    """Prompts are read in slices and then token by token, from states beside cached latents."""
    theirs = made_by_transformers(tmp_path)
    prompts = [np.random.default_rng(0).integers(0, 96, n).tolist() for n in (21, 3)]
    saved = SavedModel.open(tmp_path)
    config = inference_config(saved.model, (), rows=2, longest=85)
    made = Generator(LoadedModel.load(saved, config), GREEDY).generate(
        prompts, 64, lambda *_: False
    )
    assert [one.tokens for one in made] == [greedy(theirs, prompt, 64) for prompt in prompts]


def test_the_published_config_is_the_preset_and_has_its_parameters(tmp_path):
    preset = KimiLinearConfig(**PRESETS["kimi_linear_48b_a3b"])
    assert KimiLinearConfig(**model_settings(PUBLISHED, tmp_path)) == preset
    again = written(preset, "bfloat16", 1048576)
    unread = {"head_dim", "rope_theta", "rope_scaling", "num_nextn_predict_layers"}
    for name in PUBLISHED.keys() - unread:
        assert again[name] == PUBLISHED[name], name
    with torch.device("meta"):
        config = transformers.KimiLinearConfig.from_dict(again)
        theirs = transformers.KimiLinearForCausalLM(config)
    assert preset.parameter_count() == sum(tensor.numel() for tensor in theirs.parameters())
    assert not list(preset.broken_rules(tp=8))


def test_published_names_are_found(tmp_path):
    """transformers names the MLP of the first layer as experts, which published files do not."""
    made_by_transformers(tmp_path)
    settings = model_settings(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    model = KimiLinearConfig(**settings)
    assert replace(model, delta_chunk=8) == TINY
    for renamed in (False, True):
        files, wanted = open_tensors(tmp_path, model)
        assert {*files.names} == {name for one in wanted for name in one.hf_names}
        assert renamed == ("model.layers.0.mlp.up_proj.weight" in files.names)
        tensors = load_file(tmp_path / "model.safetensors")
        published = {
            name.replace("0.block_sparse_moe.", "0.mlp."): tensor
            for name, tensor in tensors.items()
        }
        save_file(published, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "has mla_use_nope=False"),
        ({"num_hidden_layers": 28}, "has layers of the types .*None"),
        ({"linear_attn_config": {"num_heads": 32}}, "every n-th and the last"),
        ({"mlp_layer_types": ["sparse"] * 26 + ["dense"]}, "the first layers alone are dense"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"linear_attn_config": {"safe_gate": True}}, "safe_gate"),
    ],
)
def test_what_the_family_lacks_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_settings(PUBLISHED | changes, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_depth": 1}, "mtp_depth=1 has no effect in models of the family"),
        ({"rope_theta": 5.0}, "rope_theta=5.0 has no effect"),
        ({"index_topk": 4}, "index_topk=4 has no effect"),
        ({"delta_heads": 3}, "delta_heads=3 must be a multiple of parallel.tp=2"),
        ({"delta_chunk": 12}, "power of two"),
    ],
)
def test_settings_without_a_place_are_refused(changes, message):
    assert any(message in sentence for sentence in replace(TINY, **changes).broken_rules(tp=2))


def test_what_transformers_lacks_is_not_written():
    with pytest.raises(ValueError, match="router_score"):
        written(replace(TINY, router_score="softmax"), "float32", 64)
