"""Llama-style decoders with recurrences: what is refused, and how config.json may state layers."""

import pytest
from meshes import MODELS
from msgspec.structs import replace

from jaxpipe.core.mesh import ContextParallel
from jaxpipe.model import PRESETS
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.bamba import BambaFormat
from jaxpipe.model.families.granite_hybrid.config import GraniteHybridConfig
from jaxpipe.model.families.granite_hybrid.huggingface import GraniteHybridFormat
from jaxpipe.model.families.olmo_hybrid.config import OlmoHybridConfig
from jaxpipe.model.families.olmo_hybrid.huggingface import OlmoHybridFormat

GRANITE, OLMO = MODELS["packed_granite"], MODELS["packed_olmo_hybrid"]
BAMBA, ONE_GROUP = MODELS["bamba"], MODELS["packed_bamba"]
BAMBA_FILE = {  # as published, with fields that have no effect
    "architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "mamba_proj_bias": False, "model_type": "bamba",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "use_mamba_kernels": True, "vocab_size": 128256,
}  # fmt: skip
GRANITE_TYPES = ["mamba"] * 32
for layer in (10, 13, 17, 27):
    GRANITE_TYPES[layer] = "attention"
GRANITE_FILE = {  # of granite-4.0-h-350m
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12,
    "hidden_size": 768, "intermediate_size": 2048, "layer_types": GRANITE_TYPES,
    "logits_scaling": 3, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32,
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 32768, "num_attention_heads": 12, "num_experts_per_tok": 0,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0,
    "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-5,
    "rope_theta": 10000, "shared_intermediate_size": 2048, "tie_word_embeddings": True,
    "vocab_size": 100352,
}  # fmt: skip
OLMO_FILE = {  # of Olmo-Hybrid-7B, whose attention has no positions
    "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "vocab_size": 100352,
    "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 30, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": None},
    "linear_allow_neg_eigval": True,
}  # fmt: skip
FILES = {
    BambaFormat: BAMBA_FILE,
    GraniteHybridFormat: GRANITE_FILE,
    OlmoHybridFormat: OLMO_FILE,
}


@pytest.mark.parametrize(
    ("model", "tp", "fields", "said"),
    [
        (BAMBA, 3, {}, "model.mamba_groups=4 must be a multiple of parallel.tp=3"),
        (ONE_GROUP, 2, {"mamba_heads": 7}, "model.mamba_heads=7 must be a multiple of"),
        (BAMBA, 1, {"sliding_window": 4}, "model.sliding_window=4 has no effect"),
        (GRANITE, 1, {"rope_theta": 1e4}, "model.rope_theta=10000.0 has no effect"),
        (OLMO, 1, {"rotary_share": 0.5}, "model.rotary_share=0.5 has no effect"),
    ],
)
def test_what_is_refused(model, tp, fields, said):
    assert any(said in sentence for sentence in replace(model, **fields).broken_rules(tp))
    assert not [*model.broken_rules(2)]


def test_devices_that_exchange_heads_need_groups():
    exchange = AttentionCase(ContextParallel(2, 2))
    assert not [*BAMBA.unmet_by_attention(exchange, 2)]
    assert "model.mamba_groups=1" in " ".join(ONE_GROUP.unmet_by_attention(exchange, 2))


def test_published_files_are_read():
    found = BambaFormat().expected(BAMBA_FILE)
    assert found["layer_pattern"] == "MMMMMMMMM*MMMMMMMM*MMMMMMMM*MMMM"
    assert (found["mamba_head_dim"], found["mamba_state"], found["rotary_share"]) == (64, 128, 0.5)
    for form, preset in (
        (GraniteHybridFormat, GraniteHybridConfig(**PRESETS["granite_4_h_350m"])),
        (OlmoHybridFormat, OlmoHybridConfig(**PRESETS["olmo_hybrid_7b"])),
    ):
        found = form().expected(FILES[form])
        assert {name: getattr(preset.resolved(), name) for name in found} == found


@pytest.mark.parametrize(
    ("form", "fields", "said"),
    [
        (BambaFormat, {"mamba_d_head": 32}, "mamba_expand x hidden_size=8192"),
        (BambaFormat, {"time_step_limit": [0.01, 0.1]}, r"time_step_limit=\[0.01, 0.1\]"),
        (BambaFormat, {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        (GraniteHybridFormat, {"position_embedding_type": "rope"}, "position_embedding_type"),
        (GraniteHybridFormat, {"layer_types": ["mamba", "mlp"]}, "layers of mlp"),
        (GraniteHybridFormat, {"num_local_experts": 4, "intermediate_size": 3}, "no multiple of"),
        (OlmoHybridFormat, {"rope_parameters": None}, "has rope_theta=10000.0, if by default"),
        (OlmoHybridFormat, {"linear_allow_neg_eigval": False}, "linear_allow_neg_eigval=False"),
        (OlmoHybridFormat, {"layer_types": ["full_attention"] * 31}, "every n-th layer"),
    ],
)
def test_what_an_import_refuses(form, fields, said):
    with pytest.raises(ValueError, match=said):
        form().expected({**FILES[form], **fields})


@pytest.mark.parametrize(
    ("model", "form", "said"),
    [
        (BAMBA, BambaFormat(), r"no multiple of model.d_model=32, .*: it cannot be exported"),
        (
            replace(GRANITE, mamba_head_dim=4), GraniteHybridFormat(),
            "model.d_ff=48, but the experts of a Granite 4.0 H have only 12",
        ),
    ],
)  # fmt: skip
def test_what_an_export_refuses(model, form, said):
    with pytest.raises(ValueError, match=said):
        form.written(model, "float32", 64)
