"""Tiny models of transformers by name: the class, and the fields of its configuration."""

VOCABULARY = 32

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
# Of the wavelengths 6, 29 and 135 one is kept, one is interpolated, one is scaled.
_LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
    "decoder_sparse_step": 2, "mlp_only_layers": [],
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
        "beta_slow": 0.5,
    },
}  # fmt: skip
MODELS = {
    "llama": (
        "Llama",
        SIZES | {"head_dim": 6, "rms_norm_eps": 1e-5, "rope_parameters": _LLAMA_3},
    ),
    "qwen3": (
        "Qwen3",
        SIZES | {"head_dim": 6, "rope_parameters": _ROPE, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", SIZES | {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", SIZES | _EXPERTS | {"head_dim": 4, "rope_parameters": _ROPE}),
    "mixtral": (
        "Mixtral",
        SIZES
        | {"rope_parameters": _ROPE, "num_local_experts": 4, "intermediate_size": 12},
    ),
    "gemma3": (
        "Gemma3",
        SIZES
        | {
            "head_dim": 6, "query_pre_attn_scalar": 10, "sliding_window": 3,
            "pad_token_id": None,  # the embedding of such a token would have no gradient
            "final_logit_softcapping": 0.5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        SIZES
        | {
            "head_dim": 6, "intermediate_size": 12, "sliding_window": 3, "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 64, "rope_theta": 100.0,
            },
        },
    ),
    # Layers with and without positions, dense and sparse; chunks and temperatures within a row.
    "llama4": (
        "Llama4",
        SIZES
        | {
            "head_dim": 6, "intermediate_size": 12, "intermediate_size_mlp": 20,
            "num_local_experts": 4, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3,
            "attention_chunk_size": 3, "floor_scale": 2, "attn_scale": 0.5,
            "rope_parameters": _LLAMA_3 | {"high_freq_factor": 1.0},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        SIZES | LATENT | {
            "q_lora_rank": None, "n_group": 2, "topk_group": 1,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        SIZES | LATENT | {"q_lora_rank": 8, "n_group": 2, "topk_group": 2},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCABULARY, "n_embd": 16, "n_head": 4, "n_layer": 4, "n_inner": 20,
            "n_positions": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.5}
# Two layers with a gated delta network, and one with attention, in turn; chunks of one row.
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_d_conv": 3,
    "mamba_chunk_size": 4, "mamba_n_groups": 1, "pad_token_id": None,
}  # fmt: skip
# Further families, without a record: `test_relatives.py` compares them where transformers is.
RELATIVES = {
    "olmo2": ("Olmo2", SIZES | {"rope_parameters": _ROPE, "pad_token_id": None}),
    "olmo3": (
        "Olmo3",
        SIZES
        | {
            "sliding_window": 3, "pad_token_id": None,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _YARN},
        },
    ),
    "glm4": (
        "Glm4", SIZES | {"head_dim": 8, "rope_parameters": _PARTIAL, "pad_token_id": None}
    ),
    "seed_oss": (
        "SeedOss", SIZES | {"head_dim": 6, "rope_parameters": _ROPE, "pad_token_id": None}
    ),
    "exaone4": (
        "Exaone4",
        SIZES
        | {
            "head_dim": 6, "rope_parameters": _ROPE, "sliding_window": 3,
            "sliding_window_pattern": 2,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        SIZES
        | {
            "head_dim": 8, "rope_parameters": _PARTIAL, "attention_bias": True,
            "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 6, "routed_scaling_factor": 2.5,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        SIZES
        | {
            "rope_parameters": _ROPE, "moe_num_experts": 4, "moe_k": 2, "pad_token_id": None,
            "moe_intermediate_size": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        SIZES
        | {
            "head_dim": 8, "rope_parameters": _PARTIAL, "intermediate_size": 12,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        SIZES
        | _DELTA
        | {
            "head_dim": 8, "rope_parameters": _PARTIAL, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 6, "shared_expert_intermediate_size": 12,
        },
    ),
    "qwen3_5": (
        "Qwen3_5", SIZES | _DELTA | {"head_dim": 8, "rope_parameters": _PARTIAL}
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {name: size for name, size in SIZES.items() if name != "intermediate_size"}
        | _DELTA
        | {
            "head_dim": 8, "rope_parameters": _PARTIAL, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 6, "shared_expert_intermediate_size": 12,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        SIZES | _DELTA | {"rope_parameters": {"rope_theta": None}, "pad_token_id": None},
    ),
    # Chunks end within a row; devices share one group.
    "bamba": (
        "Bamba",
        SIZES | _MAMBA | {"attn_layer_indices": [1], "rope_parameters": _PARTIAL},
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        SIZES
        | _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2, "intermediate_size": 6,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 12,
            "embedding_multiplier": 12.0, "attention_multiplier": 0.7, "logits_scaling": 3.0,
            "residual_multiplier": 0.22,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybrid",
        SIZES
        | _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 0,
            "shared_intermediate_size": 20, "mamba_n_groups": 2, "tie_word_embeddings": True,
        },
    ),
    # One mixer, MLP or mixture a layer; chunks end within a row.
    "nemotron_h": (
        "NemotronH",
        {
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
            "hybrid_override_pattern": "M-*EM", "mamba_num_heads": 4, "mamba_head_dim": 6,
            "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "chunk_size": 4,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
            "moe_shared_expert_intermediate_size": 12, "routed_scaling_factor": 2.5,
            "max_position_embeddings": 512, "pad_token_id": None,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "vocab_size": VOCABULARY, "hidden_size": 16, "moe_intermediate_size": 6,
            "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "q_lora_rank": 10,
            "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 5, "sliding_window": 3,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 2, "heavily_compressed_attention": 4,
            },
            "index_n_heads": 16, "index_head_dim": 6, "index_topk": 2, "hc_mult": 3,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
            "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2, "rope_theta": 100.0,
            "compress_rope_theta": 150.0, "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        SIZES
        | {
            "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4, "v_head_dim": 5, "num_local_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 6, "pad_token_id": None,
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4,
            "linear_head_dim": 6, "linear_conv_kernel_dim": 3,
        },
    ),
    "phi3": (
        "Phi3",
        SIZES | {"head_dim": 4, "rope_parameters": _PARTIAL, "sliding_window": 3,
                  "pad_token_id": None},
    ),
}  # fmt: skip
