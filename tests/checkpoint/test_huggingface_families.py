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


def test_both_versions_of_transformers_describe_the_same_olmo():
    """As version 4 has it, and as version 5 writes it again."""
    json = config_json("olmo3_7b")
    older = config_json("olmo3_7b", rope_parameters=..., layer_types=...)
    newer = config_json("olmo3_7b", rope_theta=..., rope_scaling=...)
    assert older != json != newer
    want = model_settings(json, Path())
    assert model_settings(older, Path()) == model_settings(newer, Path()) == want


def test_published_files_say_otherwise_what_ours_say():
    """A pattern for types of layers, a width for a share, a layer that predicts further tokens."""
    pattern = config_json("exaone4_32b", layer_types=..., sliding_window_pattern="LLLG")
    assert model_settings(pattern, Path()) == model_settings(config_json("exaone4_32b"), Path())
    width = config_json("minimax_m2", partial_rotary_factor=..., rotary_dim=64, num_mtp_modules=3)
    assert model_settings(width, Path()) == model_settings(config_json("minimax_m2"), Path())
    model = model_of("glm4_5_air")
    form = hf_format(model)
    assert form.ignores("model.layers.46.eh_proj.weight", model)
    assert not form.ignores("model.layers.45.mlp.gate.weight", model)
    assert not form.ignores("model.layers.4.mlp.gate.weight", model)


@pytest.mark.parametrize(("longest", "fits"), [(64, True), (32, False)])
def test_a_phi_scales_by_the_ratio_of_two_lengths(longest, fits):
    factors = {"rope_short_factors": (1.0,) * 48, "rope_long_factors": (2.0,) * 48}
    scaling = {"rope_scaling": "longrope", "rope_factor": 4.0, "rope_original_positions": 16}
    model = msgspec.structs.replace(model_of("phi3_mini"), **factors, **scaling)
    if fits:
        found = hf_format(model).written(model, "bfloat16", longest)
        assert model_settings(found, Path())["rope_long_factors"] == (2.0,) * 48
    else:
        with pytest.raises(ValueError, match="rope_factor=4.0, but models of Phi-3 have only 2.0"):
            hf_format(model).written(model, "bfloat16", longest)


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
    "partial_rotary_factor=0.5 but this model has only": (
        "olmo2_7b", {"partial_rotary_factor": 0.5}
    ),
    "has a rope_theta of sliding_attention that is not that of full_attention": (
        "olmo3_7b", {"rope_parameters": {LOCAL: {"rope_theta": 1e4}, FULL: {"rope_theta": 5e5}}}
    ),
    "rope_type='yarn' but this model has only rope_type='longrope'": (
        "phi4", {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    ),
    "scoring_func='softmax' but": ("minimax_m2", {"scoring_func": "softmax"}),
    "attention_out_bias=True but": ("seed_oss_36b", {"attention_out_bias": True}),
    "only those of the quant_method 'mxfp4' can be read": (
        "gpt_oss_20b", {"quantization_config": {"quant_method": "fp8"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_family_lacks_is_refused_with_a_sentence(message):
    preset, changes = REFUSED[message]
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_settings(config_json(preset, **changes), Path())
