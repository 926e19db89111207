"""DeepSeek-V4 beside transformers: published files, greedy text, sizes, and what is refused.

Logits and exports are compared in `tests/checkpoint`, gradients in `test_relatives.py`.
"""

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
from jaxpipe.model import FAMILIES, PRESETS
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.deepseek_v4.huggingface import written

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from inference.test_generate import GREEDY, greedy  # noqa: E402

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 40, "moe_intermediate_size": 24, "vocab_size": 96,
    "num_attention_heads": 4, "head_dim": 12, "q_lora_rank": 20, "partial_rotary_factor": 0.5,
    "o_groups": 2, "o_lora_rank": 10, "sliding_window": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "index_n_heads": 16, "index_head_dim": 10, "index_topk": 3,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "initializer_range": 0.2,
}  # fmt: skip
# As the published files describe a model: DeepSeek-V4-Flash, without what is the same by default.
PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 43, "hidden_size": 4096,
    "num_attention_heads": 64, "vocab_size": 129280, "qk_rope_head_dim": 64, "num_hash_layers": 3,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}  # fmt: skip


def made_by_transformers():
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**SIZES)).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in key:
                tensor.uniform_(0.5, 1.5)
            if "tid2eid" in key:
                tensor.copy_((torch.arange(96)[:, None] + torch.arange(2)) % 4)
    return model


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(tmp_path):
    """Across the ends of windows and of entries; jaxpipe computes all tokens again."""
    theirs = made_by_transformers()
    theirs.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(0).integers(0, 96, n).tolist() for n in (21, 3)]
    saved = SavedModel.open(tmp_path)
    config = inference_config(saved.model, (), rows=2, longest=85)
    generator = Generator(LoadedModel.load(saved, config), GREEDY)
    made = generator.generate(prompts, 64, lambda *_: False)
    assert [one.tokens for one in made] == [greedy(theirs, prompt, 64) for prompt in prompts]


def test_a_preset_has_the_parameters_of_transformers():
    """Without the tables of hashed layers, which are buffers."""
    first, cycle = ["sliding_attention"] * 2, ["compressed_sparse", "heavily_compressed"]
    types = [*first, *(f"{name}_attention" for name in cycle * 20 + cycle[:1])]
    config = transformers.DeepseekV4Config(layer_types=types)
    with torch.device("meta"):
        theirs = transformers.DeepseekV4ForCausalLM(config)
    model = FAMILIES["deepseek_v4"].config(**PRESETS["deepseek_v4_flash"])
    assert model.parameter_count() == sum(tensor.numel() for tensor in theirs.parameters())
    assert not list(model.broken_rules(tp=8))


def test_the_published_config_is_the_preset(tmp_path):
    found = model_settings(PUBLISHED, tmp_path)
    preset = DeepseekV4Config(**PRESETS["deepseek_v4_flash"])
    assert DeepseekV4Config(**found) == preset


def test_published_names_are_found(tmp_path):
    """Files of DeepSeek name the norm of keys, the embedding and the last sum in another way."""
    made_by_transformers().save_pretrained(tmp_path)
    settings = model_settings(transformers.DeepseekV4Config(**SIZES).to_dict() | {
        "architectures": ["DeepseekV4ForCausalLM"]
    }, tmp_path)  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.removeprefix("model.")
        .replace("attn.norm.", "attn.kv_norm.")
        .replace("embed_tokens", "embed")
        .replace("hc_head.hc", "hc_head"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() >= {"embed.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"}
    save_file(renamed, tmp_path / "model.safetensors")
    files, wanted = open_tensors(tmp_path, DeepseekV4Config(**settings))
    assert {*files.names} == {name for one in wanted for name in one.hf_names}


def test_numbers_of_experts_that_the_model_lacks_are_refused(tmp_path):
    theirs = made_by_transformers()
    theirs.model.layers[0].mlp.gate.tid2eid[3, 1] = 4
    theirs.save_pretrained(tmp_path)
    settings = model_settings(theirs.config.to_dict(), tmp_path)
    with pytest.raises(ConfigError, match="tid2eid with numbers from 0 to 4, but its experts are"):
        open_tensors(tmp_path, DeepseekV4Config(**settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "has mlp_layer_types=.*only the"),
        ({"layer_types": ["full_attention"] * 4}, "has layer_types or compress_ratios of 4 layers"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
        ({"engram": 1}, "engram"),
    ],
)
def test_what_the_family_lacks_is_refused(tmp_path, changes, message):
    config = transformers.DeepseekV4Config(**SIZES).to_dict()
    fields = config | {"architectures": ["DeepseekV4ForCausalLM"]} | changes
    with pytest.raises(ConfigError, match=message):
        model_settings(fields, tmp_path)


def test_what_transformers_lacks_is_not_written(tmp_path):
    model = DeepseekV4Config(**PRESETS["deepseek_v4_flash"])
    with pytest.raises(ValueError, match="router_score"):
        written(replace(model, router_score="sigmoid"), "float32", 64)
