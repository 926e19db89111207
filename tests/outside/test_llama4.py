"""Llama 4 against transformers: logits, files both ways, generation, and what neither can express.

Every gradient is compared in `test_recorded.py`.
"""

import numpy as np
import pytest
from hf_models import all_tensors, assert_same_bytes, our_logits, stored_params
from msgspec.structs import replace

from jaxpipe.checkpoint.hf.parameters import export_huggingface, import_huggingface, model_settings
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES, PRESETS
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.families.llama4.huggingface import Llama4Format

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from inference.test_generate import generator, greedy  # noqa: E402

_SIZES = {
    "num_hidden_layers": 4, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 24, "intermediate_size_mlp": 56, "vocab_size": 96,
    "num_local_experts": 4, "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5,
    "max_position_embeddings": 96, "initializer_range": 0.2,
}  # fmt: skip
_SCALED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "scout": _SIZES | {"rope_parameters": _SCALED},
    "maverick": _SIZES | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "use_qk_norm": False,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "num_experts_per_tok": 2,
    },
}  # fmt: skip
PUBLISHED = {
    "llama4_scout": {"rope_scaling": _SCALED | {"original_max_position_embeddings": 8192}},
    "llama4_maverick": {"interleave_moe_layer_step": 2, "num_local_experts": 128},
}


def made_by_transformers(name):
    """Return a random model whose gains are not one."""
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**MODELS[name])).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.uniform_(0.5, 1.5)
    return model


def fields_of(config, **changes):
    return config.to_dict() | {"architectures": ["Llama4ForCausalLM"]} | changes


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_files(tmp_path, name):
    """The same logits beyond several chunks; what is exported is bit for bit what was read."""
    theirs = made_by_transformers(name)
    theirs.save_pretrained(tmp_path / "hf")
    model = Llama4Config(**model_settings(fields_of(theirs.config), tmp_path))
    assert not list(model.broken_rules(tp=2))
    assert model.parameter_count() == sum(tensor.numel() for tensor in theirs.parameters())
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    want = logits_of(theirs, tokens)
    step = import_huggingface(tmp_path / "hf", model, tmp_path / "c", {})
    found = our_logits(model, stored_params(step), tokens)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    export_huggingface(
        StoredCheckpoint(step), model, tmp_path / "out", dtype="float32", max_positions=64,
        max_shard_bytes=40_000, serving=ServingFiles(),
    )  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(logits_of(again, tokens), want)
    assert_same_bytes(all_tensors(tmp_path / "out"), all_tensors(tmp_path / "hf"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ["", "parallel.tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(tmp_path, name, overrides):
    """With a cache, across the ends of chunks."""
    theirs = made_by_transformers(name)
    theirs.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(0).integers(0, 96, n).tolist() for n in (21, 3)]
    made = generator(tmp_path, *overrides.split()).generate(prompts, 64, lambda *_: False)
    assert [one.tokens for one in made] == [greedy(theirs, prompt, 64) for prompt in prompts]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_parameters_of_transformers(preset):
    config = transformers.Llama4TextConfig(**PUBLISHED[preset])
    with torch.device("meta"):
        theirs = transformers.Llama4ForCausalLM(config)
    model = FAMILIES["llama4"].config(**PRESETS[preset])
    assert model.parameter_count() == sum(tensor.numel() for tensor in theirs.parameters())
    assert not list(model.broken_rules(tp=8))


REFUSED = [
    ({"layer_types": ["full_attention"] * 4}, "has layer_types that are not at regular intervals"),
    ({"no_rope_layers": [1, 0, 0, 1]}, "has no_rope_layers that are not at regular intervals"),
    ({"moe_layers": [0]}, "has moe_layers that are not at regular intervals"),
    ({"attention_bias": True}, "has attention_bias=True but this model has only"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_the_family_lacks_is_refused(tmp_path, changes, message):
    config = transformers.Llama4TextConfig(**MODELS["scout"])
    with pytest.raises(ConfigError, match=message):
        model_settings(fields_of(config, **changes), tmp_path)


def test_what_transformers_lacks_is_not_written(tmp_path):
    config = transformers.Llama4TextConfig(**MODELS["scout"])
    model = Llama4Config(**model_settings(fields_of(config), tmp_path))
    with pytest.raises(ValueError, match="the experts of Llama 4 have only 1: it cannot be exp"):
        Llama4Format().written(replace(model, shared_experts=2), "float32", 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "cudnn"}, "attention_chunk=8 masks keys that the kernel of model.attention"),
        ({"sliding_window": 4}, "attention_chunk=8 and model.sliding_window=4 both limit the same"),
    ],
)
def test_chunks_exclude(tmp_path, changes, message):
    config = transformers.Llama4TextConfig(**MODELS["scout"])
    model = Llama4Config(**model_settings(fields_of(config), tmp_path))
    model = replace(model, **changes)
    [sentence] = (*model.broken_rules(tp=1), *model.unmet_by_attention(AttentionCase(), tp=1))
    assert message in sentence
