"""Published models by name, with the numbers of their configurations, and the family."""

from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.family import ModelFamily

_MLA = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "norm_eps": 1e-6,
}  # fmt: skip
_YARN = {"rope_scaling": "yarn", "rope_original_positions": 4096, "rope_beta_slow": 1.0}
_YARN_40 = _YARN | {"rope_factor": 40.0, "rope_beta_fast": 32.0, "max_seq_len": 163840}
# The router of DeepSeek-V3: sigmoid, groups by their two best experts, biases on the choice.
_V3_ROUTER = {"router_score": "sigmoid", "norm_topk_prob": True, "router_bias": True}


_V3 = _MLA | _YARN_40 | _V3_ROUTER | {
    "n_layers": 61, "d_model": 7168, "n_heads": 128, "d_ff": 18432, "vocab_size": 129280,
    "rope_theta": 10000.0, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0,
    "q_lora_rank": 1536, "n_experts": 256, "experts_per_token": 8, "d_expert": 2048,
    "shared_experts": 1, "first_dense_layers": 3, "expert_groups": 8, "groups_per_token": 4,
    "router_scale": 2.5,
}  # fmt: skip

# GLM-5 Team 2026, "GLM-5: from Vibe Coding to Agentic Engineering", and its config.json
_GLM5 = _MLA | _V3_ROUTER | {
    "n_layers": 78, "d_model": 6144, "n_heads": 64, "d_ff": 12288, "vocab_size": 154880,
    "rope_theta": 1e6, "norm_eps": 1e-5, "max_seq_len": 202752, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_experts": 256, "experts_per_token": 8,
    "d_expert": 2048, "shared_experts": 1, "first_dense_layers": 3, "router_scale": 2.5,
    "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
    "index_rotates_neighbours": True,
}  # fmt: skip

_PRESETS: dict[str, dict[str, int | float | bool | str]] = {
    "deepseek_v2_lite": _MLA | _YARN_40 | {
        "n_layers": 27, "d_model": 2048, "n_heads": 16, "d_ff": 10944, "vocab_size": 102400,
        "rope_theta": 10000.0, "rope_mscale": 0.707, "rope_mscale_all_dim": 0.707,
        "n_experts": 64, "experts_per_token": 6, "d_expert": 1408, "shared_experts": 2,
        "first_dense_layers": 1, "norm_topk_prob": False, "group_score_experts": 1,
    },
    "deepseek_v3": _V3,
    "deepseek_v3.2": _V3 | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    "glm5": _GLM5,
    "glm5.2": _GLM5 | {
        "rope_theta": 8e6, "max_seq_len": 1048576, "index_group": 4, "index_first": 2
    },
    "kimi_k2": _MLA | _YARN | _V3_ROUTER | {
        "n_layers": 61, "d_model": 7168, "n_heads": 64, "d_ff": 18432, "vocab_size": 163840,
        "rope_theta": 50000.0, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0,
        "rope_factor": 32.0, "rope_beta_fast": 1.0, "max_seq_len": 131072,
        "q_lora_rank": 1536, "n_experts": 384, "experts_per_token": 8, "d_expert": 2048,
        "shared_experts": 1, "first_dense_layers": 1, "router_scale": 2.827,
    },
}  # fmt: skip
DEEPSEEK = ModelFamily(
    "deepseek",
    DeepseekConfig,
    _PRESETS,
    model="jaxpipe.model.families.deepseek.decoder:DeepseekDecoder",
    huggingface="jaxpipe.model.families.deepseek.huggingface",
)
