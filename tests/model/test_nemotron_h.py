"""A Nemotron-H's pattern of layers: what is refused, and how config.json may state it."""

import pytest
from meshes import MODELS
from msgspec.structs import replace

from jaxpipe.core.mesh import ContextParallel
from jaxpipe.model import FAMILIES
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.nemotron_h.huggingface import NemotronHFormat
from jaxpipe.model.layers.lora import Adapters, LoraDecoder

MODEL, SPARSE = MODELS["nemotron_h"], MODELS["packed_nemotron_h"]
FILE = {
    "architectures": ["NemotronHForCausalLM"], "hidden_size": 16, "num_attention_heads": 4,
    "intermediate_size": 20, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "tp", "fields", "said"),
    [
        (MODEL, 1, {"layer_pattern": "M-E"}, "1 of 4 layers are E"),
        (SPARSE, 1, {"layer_pattern": "M*-"}, "0 of 4 layers are E"),
        (MODEL, 3, {}, "model.mamba_groups=4 must be a multiple of parallel.tp=3"),
        (MODEL, 1, {"mamba_heads": 6}, "model.mamba_heads=6 must be a multiple of"),
        (MODEL, 1, {"sliding_window": 4}, "model.sliding_window=4 has no effect"),
        (MODEL, 1, {"rope_theta": 1e4}, "model.rope_theta=10000.0 has no effect"),
        (SPARSE, 1, {"moe_every": 2}, "model.moe_every=2 has no effect"),
    ],
)
def test_what_is_refused(model, tp, fields, said):
    assert any(said in sentence for sentence in replace(model, **fields).broken_rules(tp))
    assert not [*model.broken_rules(2)]


@pytest.mark.parametrize(
    ("tp", "sequence", "said"),
    [
        (1, ContextParallel(2, 1), "Mamba-2"),
        (2, ContextParallel(4, 4), "model.mamba_groups"),
    ],
)
def test_a_device_has_neighbouring_tokens_or_equal_shares_of_heads(tp, sequence, said):
    unmet = [*MODEL.unmet_by_attention(AttentionCase(sequence), tp)]
    assert any(said in sentence for sentence in unmet)
    for heads in (0, 2):
        assert not [*MODEL.unmet_by_attention(AttentionCase(ContextParallel(2, heads)), tp)]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"hybrid_override_pattern": "MM*-"}, "MM*-"),
        ({"layers_block_type": ["mamba", "attention", "mlp", "moe"]}, "M*-E"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "M*"),
    ],
)
def test_the_kinds_of_layers_are_read_from_old_and_new_files(fields, pattern):
    found = NemotronHFormat().expected({**FILE, **fields})
    assert (found["layer_pattern"], found["n_layers"]) == (pattern, len(pattern))
    assert ("router_score" in found) == ("E" in pattern)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers_block_type": ["mamba", "sliding_attention"]}, "sliding_attention"),
        ({"hybrid_override_pattern": "M|-"}, "M|-"),
        ({"moe_latent_size": 8}, "moe_latent_size=8"),
        ({"moe_intermediate_size": 6, "moe_shared_expert_intermediate_size": 8}, "no multiple of"),
    ],
)
def test_what_an_import_refuses(fields, said):
    with pytest.raises(ValueError, match="take another checkpoint") as error:
        NemotronHFormat().expected({**FILE, **fields})
    assert said in str(error.value)


def test_a_pattern_repeats_and_is_exported_for_every_layer():
    model = replace(MODEL, n_layers=6, layer_pattern="M-*M")
    assert model.layer_kinds == ("mamba", "mlp", "attention", "mamba", "mamba", "mlp")
    assert NemotronHFormat().written(model, "float32", 64)["hybrid_override_pattern"] == "M-*MM-"


def test_experts_are_exported_with_one_that_is_shared():
    model = replace(SPARSE, router_score="sigmoid", router_bias=True)
    form = NemotronHFormat()
    assert form.own_written(model)["moe_shared_expert_intermediate_size"] == 12
    with pytest.raises(ValueError, match="at least one that is shared"):
        form.own_written(replace(model, shared_experts=0))


def test_every_product_may_have_an_adapter():
    base = FAMILIES["nemotron_h"].build(SPARSE)
    decoder = LoraDecoder(base, Adapters(2, 4.0, base.products))
    assert {kind for kind in decoder.functions.kinds_by_name} == set(SPARSE.layer_kinds)
