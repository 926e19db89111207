"""config.json of the further families: versions of transformers, and refusals of what they lack."""

import re
from pathlib import Path

import msgspec
import pytest

from jaxpipe.checkpoint.hf.parameters import hf_format, model_settings
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES, PRESETS

LOCAL, FULL = "sliding_attention", "full_attention"


def config_json(preset, **changes):
    """Return the config.json that an export of a preset writes; ... removes a field."""
    model = model_of(preset)
    written = hf_format(model).written(model, "bfloat16", model.max_seq_len) | changes
    return {name: value for name, value in written.items() if value is not ...}


def model_of(preset):
    fields = PRESETS[preset]
    return FAMILIES[fields["family"]].config(**fields, preset=preset)


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("gpt2")])
def test_a_preset_is_what_its_config_json_says(preset):
    model, found = model_of(preset).resolved(), model_settings(config_json(preset), Path())
    assert {name: getattr(model, name) for name in found} == found
    assert model == type(model)(**found, preset=preset).resolved()


def test_both_versions_of_transformers_describe_the_same_gemma():
    """As in the files of 4B, and as version 5 writes them again."""
    ropes = {
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    gone = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ...)
    newer = config_json("gemma3_4b", **gone, rope_parameters=ropes)
    older = config_json("gemma3_4b", layer_types=..., sliding_window_pattern=6)
    want = model_settings(config_json("gemma3_4b"), Path())
    assert model_settings(newer, Path()) == model_settings(older, Path()) == want


def test_the_published_gemma_with_images_has_the_same_text_model():
    """Its `text_config` leaves out what equals transformers' defaults."""
    nested = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024, "max_position_embeddings": 131072,
    }  # fmt: skip
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": nested}
    want = model_settings(config_json("gemma3_4b"), Path())
    assert model_settings(published, Path()) == want


def test_a_gpt_oss_without_rope_scaling_has_that_of_its_class():
    """As transformers fills it in."""
    want = model_settings(config_json("gpt_oss_120b"), Path())
    absent = config_json("gpt_oss_120b", rope_scaling=..., rope_theta=..., layer_types=...)
    assert model_settings(absent, Path()) == want


def test_a_gpt_oss_that_scales_nothing_says_so():
    """A null would be the scaling of its class."""
    model = msgspec.structs.replace(model_of("gpt_oss_120b"), rope_factor=1.0)
    written = hf_format(model).written(model, "bfloat16", model.max_seq_len)
    assert written["rope_scaling"] == {"rope_type": "default", "rope_theta": 150000.0}
    assert model_settings(written, Path()).get("rope_factor", 1.0) == 1.0
    null = config_json("gpt_oss_120b", rope_scaling=None)
    assert model_settings(null, Path()) == model_settings(config_json("gpt_oss_120b"), Path())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_every": 2}, "the experts of gpt-oss have only 1"),
        ({"d_expert": 8}, "the experts of gpt-oss have only 2880"),
        ({"qk_norm": True}, "transformers has no model with these"),
    ],
)
def test_what_transformers_cannot_describe_is_not_exported(changes, message):
    model = msgspec.structs.replace(model_of("gpt_oss_20b"), **changes)
    with pytest.raises((ValueError, ConfigError), match=message):
        hf_format(model).written(model, "bfloat16", 64)


REFUSED = {
    "attn_logit_softcapping=30.0 but this model has only": (
        "gemma3_1b", {"attn_logit_softcapping": 30.0}
    ),
    "use_bidirectional_attention=True but": ("gemma3_1b", {"use_bidirectional_attention": True}),
    "has layer_types that are not sliding_attention with full_attention in every n-th": (
        "gemma3_1b", {"layer_types": [LOCAL, FULL, LOCAL, LOCAL, FULL]}
    ),
    "scales the rotary positions of sliding_attention": (
        "gemma3_1b", {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}}
    ),
    "swiglu_limit=5.0 but this model has only swiglu_limit=7.0": (
        "gpt_oss_20b", {"swiglu_limit": 5.0}
    ),
    "attention_bias=False but": ("gpt_oss_20b", {"attention_bias": False}),
    "only those of the quant_method 'mxfp4' can be read": (
        "gpt_oss_20b", {"quantization_config": {"quant_method": "fp8"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_family_lacks_is_refused_with_a_sentence(message):
    preset, changes = REFUSED[message]
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_settings(config_json(preset, **changes), Path())
