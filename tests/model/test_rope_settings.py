"""Settings of scaled rotary positions: each rule is one sentence, and long positions count."""

import pytest

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.rope import huggingface

SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 64}
LONG = {
    "rope_scaling": "longrope", "max_seq_len": 64, "rope_original_positions": 8,
    "rope_short_factors": (1.0,) * 4, "rope_long_factors": (2.0,) * 4,
}  # fmt: skip
BROKEN = [
    ({"head_dim": 9}, "the rotated width of a head is 9 but rotary positions turn pairs"),
    ({"rope_high_freq_factor": 0.5}, "rope_high_freq_factor=0.5 must be at least model.rope_low_"),
    (
        {"rope_scaling": "yarn", "rope_beta_fast": 0.5},
        "rope_beta_fast=0.5 must be at least model.rope_beta_slow=1.0",
    ),
    ({"rope_scaling": "yarn", "rope_low_freq_factor": 2.0}, "is of model.rope_scaling='llama3'"),
    ({"rope_mscale": 1.0}, "rope_mscale=1.0 is of model.rope_scaling='yarn', but that is 'llama3'"),
    (
        {"rope_scaling": "linear", "rope_original_positions": 64},
        "is of model.rope_scaling='llama3' or 'yarn' or 'longrope', but that is 'linear'",
    ),
    ({"rope_scaling": "yarn", "rope_theta": 1.0}, "rope_theta=1.0 must exceed 1"),
    ({"rope_scaling": "dynamic"}, "model.max_seq_len=0 has no limit"),
    (
        LONG | {"rope_short_factors": (1.0,)},
        "rope_short_factors has 1 factors but a head rotates 4",
    ),
    (
        LONG | {"rope_long_factors": ()},
        "rope_long_factors has 0 factors but a head rotates 4 pairs",
    ),
    (
        LONG | {"max_seq_len": 0},
        "compares model.max_seq_len=0 with model.rope_original_positions=8",
    ),
    (
        {"rope_short_factors": (1.0,) * 4},
        "is of model.rope_scaling='longrope', but that is 'llama3'",
    ),
]


@pytest.mark.parametrize(("given", "message"), BROKEN)
def test_settings_that_do_not_fit(given, message):
    [sentence] = LlamaConfig(**SIZES, **given).broken_rules(tp=1)
    assert message in sentence


def test_a_longer_context_would_scale_dynamic_positions():
    model = LlamaConfig(**SIZES, rope_scaling="dynamic", rope_factor=2.0, max_seq_len=64)
    assert huggingface.written(model, 64)["rope_scaling"] == {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="scaled beyond model.max_seq_len=64"):
        huggingface.written(model, 128)


def test_an_attention_factor_is_written_without_scaling():
    model = LlamaConfig(**SIZES, rope_scaling="yarn", rope_attention_factor=0.5)
    scaling = huggingface.written(model, 64)["rope_scaling"]
    assert (scaling["factor"], scaling["attention_factor"]) == (1.0, 0.5)
