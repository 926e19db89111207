"""Against transformers itself: the same logits, from checkpoints that it wrote and can load."""

import hf_moe
import numpy as np
import pytest
from hf_models import our_logits, rope_scaling, stored_params, stored_variables

from jaxpipe.checkpoint.hf.parameters import export_huggingface, hf_format, import_huggingface
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.model.families.bamba import BambaConfig
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.ernie4_5_moe import Ernie45MoeConfig
from jaxpipe.model.families.exaone4 import Exaone4Config
from jaxpipe.model.families.gemma3.config import Gemma3Config
from jaxpipe.model.families.glm4 import Glm4Config
from jaxpipe.model.families.glm4_moe import Glm4MoeConfig
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt_oss.config import GptOssConfig
from jaxpipe.model.families.granite_hybrid.config import GraniteHybridConfig
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.minimax_m2 import MiniMaxM2Config
from jaxpipe.model.families.nemotron_h.config import NemotronHConfig
from jaxpipe.model.families.olmo2 import Olmo2Config
from jaxpipe.model.families.olmo3 import Olmo3Config
from jaxpipe.model.families.olmo_hybrid.config import OlmoHybridConfig
from jaxpipe.model.families.phi3 import Phi3Config
from jaxpipe.model.families.qwen3_5 import Qwen35Config
from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig
from jaxpipe.model.families.seed_oss import SeedOssConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"n_layers": 3, "d_model": 48, "n_heads": 6, "n_kv_heads": 2, "d_ff": 80, "vocab_size": 96}
DELTA = {
    "head_dim": 16, "attention_every": 2, "delta_key_heads": 2, "delta_value_heads": 4,
    "delta_key_dim": 16, "delta_value_dim": 12,
}  # fmt: skip
MAMBA = {
    "head_dim": 16, "mamba_heads": 6, "mamba_head_dim": 10, "mamba_groups": 2, "mamba_state": 12,
    "mamba_taps": 3, "mamba_chunk": 8,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES, rope_theta=10000.0),
    "llama31": LlamaConfig(
        **SIZES, head_dim=16, rope_theta=1e4, rope_factor=8.0, rope_original_positions=256
    ),
    "llama_tied": LlamaConfig(**SIZES, rope_theta=5e5, tie_embeddings=True),
    "llama_one_kv_head": LlamaConfig(**SIZES | {"n_kv_heads": 1}, head_dim=12, rope_theta=5e5),
    "mistral": LlamaConfig(**SIZES, head_dim=10, rope_theta=1e4, sliding_window=5),
    "gpt2": GPT2Config(n_layers=3, d_model=48, n_heads=6, d_ff=80, vocab_size=96, max_seq_len=64),
    "qwen2": LlamaConfig(**SIZES, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
    "qwen3": LlamaConfig(**SIZES, head_dim=14, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
    "qwen3_tied": LlamaConfig(
        **SIZES, head_dim=10, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True
    ),
    "qwen3_moe": LlamaConfig(
        **SIZES, head_dim=14, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, n_experts=8,
        experts_per_token=3, d_expert=24, first_dense_layers=1,
    ),
    "qwen3_moe_not_normalised": LlamaConfig(
        **SIZES, head_dim=14, rope_theta=1e7, norm_eps=1e-6, qk_norm=True, n_experts=6,
        experts_per_token=2, d_expert=20, moe_every=2, norm_topk_prob=False, tie_embeddings=True,
    ),
    "gemma3": Gemma3Config(
        **SIZES, head_dim=10, sliding_window=5, global_every=2, query_width=7, rope_theta=1e5,
        rope_local_theta=1e3, rope_scaling="linear", rope_factor=8.0,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, head_dim=14, sliding_window=5, n_experts=6, experts_per_token=2,
        rope_original_positions=16,
    ),
    "olmo2": Olmo2Config(**SIZES, rope_theta=1e4),
    "olmo3": Olmo3Config(
        **SIZES, sliding_window=5, global_every=2, rope_theta=1e4, rope_scaling="yarn",
        rope_factor=4.0, rope_original_positions=16,
    ),
    "glm4": Glm4Config(**SIZES, head_dim=16),
    "glm4_biased": Glm4Config(**SIZES, head_dim=12, rotary_share=1 / 3, qkv_bias=True),
    "phi3": Phi3Config(**SIZES, sliding_window=5),
    "phi3_longrope": Phi3Config(
        **SIZES, rotary_share=0.75, tie_embeddings=True, rope_scaling="longrope", rope_factor=4.0,
        rope_original_positions=16, max_seq_len=64, rope_short_factors=(1.0, 1.5, 2.0),
        rope_long_factors=(2.0, 4.0, 8.0),
    ),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=10),
    "exaone4": Exaone4Config(**SIZES, sliding_window=5, global_every=3, rope_theta=1e4),
    "exaone4_without_windows": Exaone4Config(**SIZES, tie_embeddings=True, rope_theta=1e4),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, head_dim=16, n_experts=8, experts_per_token=3, d_expert=24, qk_norm=True,
        router_scale=2.5, expert_groups=4, groups_per_token=2, shared_experts=2,
    ),
    "ernie4_5_moe": Ernie45MoeConfig(
        **SIZES, head_dim=14, n_experts=8, experts_per_token=3, d_expert=24,
    ),
    "minimax_m2": MiniMaxM2Config(**SIZES, head_dim=12, n_experts=6, experts_per_token=2),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, **DELTA, n_experts=8, experts_per_token=3, d_expert=24,
    ),
    "qwen3_5": Qwen35Config(**SIZES, **DELTA, tie_embeddings=True),
    "qwen3_5_moe": Qwen35Config(
        **SIZES | {"d_ff": 24}, **DELTA, n_experts=8, experts_per_token=3, d_expert=24,
        shared_experts=2,
    ),
    "deepseek_v4": DeepseekV4Config(
        n_layers=5, d_model=48, n_heads=6, d_ff=24, vocab_size=96, head_dim=12, qk_rope_head_dim=6,
        q_lora_rank=20, o_groups=3, o_lora_rank=8, sliding_window=5, attention_first=("window",),
        csa_rate=2, hca_rate=4, index_n_heads=16, index_head_dim=10, index_topk=3, n_experts=6,
        experts_per_token=2, num_hash_layers=2, rope_factor=4.0, rope_original_positions=16,
    ),
    "kimi_linear": KimiLinearConfig(
        n_layers=5, d_model=48, n_heads=6, d_ff=80, vocab_size=96, kv_lora_rank=20,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12, attention_every=3, delta_heads=2,
        delta_head_dim=12, n_experts=8, experts_per_token=3, d_expert=24, shared_experts=2,
        router_scale=2.5,
    ),
    "nemotron_h": NemotronHConfig(**SIZES | {"n_layers": 5}, **MAMBA, layer_pattern="M-*"),
    "nemotron_h_moe": NemotronHConfig(
        **SIZES, **MAMBA, layer_pattern="ME*", n_experts=8, experts_per_token=3, d_expert=24,
        shared_experts=2, router_score="sigmoid", router_bias=True, router_scale=2.5,
    ),
    # transformers saves all convolutions in three equal parts, whatever their widths are.
    "olmo_hybrid": OlmoHybridConfig(**SIZES, **DELTA | {"delta_key_heads": 4, "delta_key_dim": 12}),
    "bamba": BambaConfig(
        **SIZES, **MAMBA | {"head_dim": 8, "mamba_head_dim": 16}, layer_pattern="M*", rope_theta=1e4
    ),
    "granite_hybrid": GraniteHybridConfig(
        **SIZES | {"d_ff": 24}, **MAMBA | {"mamba_heads": 12, "mamba_head_dim": 8},
        layer_pattern="M*", n_experts=8, experts_per_token=3, d_expert=24, shared_experts=2,
        embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.4,
    ),
    "granite_hybrid_dense": GraniteHybridConfig(
        **SIZES, **MAMBA | {"mamba_head_dim": 16, "mamba_groups": 1}, layer_pattern="*MM",
        logits_scaling=0.5,
    ),
    "mixtral": LlamaConfig(**SIZES, head_dim=14, n_experts=6, experts_per_token=2, rope_theta=1e6),
}  # fmt: skip
# Where a query meets the state of a gated delta network nearly at a right angle, the norm of the
# output enlarges rounding: transformers in float32 is as far from itself in float64, where
# `tests/outside/test_relatives.py` compares both. For Gemma 3 it is 3e-5 on some processors.
GATED = "qwen3_next", "qwen3_5", "qwen3_5_moe"
TOLERANCES = dict.fromkeys((*GATED, "gemma3"), 1e-4)


def made_by_transformers(model):
    """Return a random transformers model of these sizes, with norm gains other than one."""
    kind, config = config_of(model)
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "ln_" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
        for name, biases in theirs.named_buffers():
            if "correction_bias" in name:
                biases.uniform_(-0.3, 0.3)
            if "tid2eid" in name:
                tokens = np.arange(model.vocab_size)[:, None]
                biases.copy_(torch.from_numpy((tokens + np.arange(2)) % model.n_experts))
    return theirs


def config_of(model):
    """Return the class, and its configuration, of these sizes."""
    if model.family == "gpt2":
        return gpt2_of(model)
    written = hf_format(model).written(model, "float32", 64) | {"initializer_range": 0.15}
    if written["model_type"] in ("llama", "mistral", "qwen3", "qwen3_moe"):
        return llama_of(model)
    kind = transformers.CONFIG_MAPPING[written["model_type"]]
    return written["architectures"][0], kind.from_dict(written)


def gpt2_of(model):
    """Return the class, and its configuration, of these sizes."""
    return "GPT2LMHeadModel", transformers.GPT2Config(
        n_layer=model.n_layers,
        n_embd=model.d_model,
        n_head=model.n_heads,
        n_inner=model.d_ff,
        n_positions=model.max_seq_len,
        vocab_size=model.vocab_size,
        initializer_range=0.15,
    )


def llama_of(model):
    """Return the class, and its configuration, of these sizes."""
    kind = "Qwen3" if model.qk_norm else "Mistral" if model.sliding_window else "Llama"
    own = {"sliding_window": model.sliding_window} if kind == "Mistral" else {}
    if model.n_experts:
        kind, own = "Qwen3Moe", hf_moe.config_fields(model)
    return f"{kind}ForCausalLM", getattr(transformers, f"{kind}Config")(
        num_hidden_layers=model.n_layers,
        hidden_size=model.d_model,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads,
        head_dim=model.head_size,
        intermediate_size=model.d_ff,
        vocab_size=model.vocab_size,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        initializer_range=0.15,
        **own,
        **_rope(model),
    )


def _rope(model):
    theta, scaling = {"rope_theta": model.rope_theta}, rope_scaling(model)
    if int(transformers.__version__.split(".")[0]) < 5:
        return theta | {"rope_scaling": scaling}
    return {"rope_parameters": (scaling or {"rope_type": "default"}) | theta}


def logits_of(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.slow(only=["1GB-*"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_transformers_and_the_decoder_agree_both_ways(tmp_path, name, shard_size):
    model = MODELS[name]
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 17))
    theirs = made_by_transformers(model)
    expected = logits_of(theirs, tokens)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)

    step = import_huggingface(tmp_path / "hf", model, tmp_path / "checkpoints", {})
    ours = our_logits(model, stored_params(step), tokens, stored_variables(step))
    assert np.abs(expected).max() > 1
    tolerance = TOLERANCES.get(name, 1e-5)
    np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)

    export_huggingface(
        StoredCheckpoint(step),
        model,
        tmp_path / "out",
        dtype="float32",
        max_positions=64,
        max_shard_bytes=10**9 if shard_size == "1GB" else 40_000,
        serving=ServingFiles.from_meta(StoredCheckpoint(step).meta),
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(theirs)
    assert again.dtype == torch.float32
    repeated = 1e-4 if name in GATED else 0  # threads may add in another order
    np.testing.assert_allclose(logits_of(again, tokens), expected, rtol=repeated, atol=repeated)
    before, after = theirs.state_dict(), again.state_dict()
    assert sorted(before) == sorted(after)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
