"""Published models by name, with the numbers of their configurations."""

_LLAMA3 = {
    "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "head_dim": 128,
    "max_seq_len": 8192,
}  # fmt: skip
_QWEN3 = {
    "vocab_size": 151936, "rope_theta": 1000000.0, "norm_eps": 1e-6, "head_dim": 128,
    "qk_norm": True, "max_seq_len": 40960,
}  # fmt: skip
_QWEN3_MOE = {"n_experts": 128, "experts_per_token": 8, "d_expert": 768}
_MISTRAL = {"norm_eps": 1e-5, "head_dim": 128, "max_seq_len": 32768}


def _sizes(layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> dict[str, int]:
    return {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_ff": ffn,
    }


_LLAMA3_1 = _LLAMA3 | {"rope_factor": 8.0, "max_seq_len": 131072}
_LLAMA3_2 = _LLAMA3 | {"rope_factor": 32.0, "max_seq_len": 131072, "tie_embeddings": True}
_KEMPNER = _LLAMA3 | {"max_seq_len": 4096}
_TIED = {"tie_embeddings": True}
_DEBUG = {"vocab_size": 2048}  # torchtitan's models for tests


LLAMA_PRESETS: dict[str, dict[str, int | float | bool]] = {
    "llama3_8b": _LLAMA3 | _sizes(32, 4096, 32, 8, 14336),
    "llama3_70b": _LLAMA3 | _sizes(80, 8192, 64, 8, 28672),
    "llama3_1_8b": _LLAMA3_1 | _sizes(32, 4096, 32, 8, 14336),
    "llama3_1_70b": _LLAMA3_1 | _sizes(80, 8192, 64, 8, 28672),
    "llama3_1_405b": _LLAMA3_1 | _sizes(126, 16384, 128, 8, 53248),
    "llama3_2_1b": _LLAMA3_2 | _sizes(16, 2048, 32, 8, 8192) | {"head_dim": 64},
    "llama3_2_3b": _LLAMA3_2 | _sizes(28, 3072, 24, 8, 8192),
    "llama3_debugmodel": _LLAMA3_1 | _sizes(6, 256, 16, 16, 768) | _DEBUG | {"head_dim": 16},
    "kempner_13b": _KEMPNER | _sizes(40, 5120, 40, 8, 17920),
    "kempner_29b": _KEMPNER | _sizes(56, 6144, 48, 8, 21504),
    "mistral_7b_v0_1": _MISTRAL
    | _sizes(32, 4096, 32, 8, 14336)
    | {"vocab_size": 32000, "rope_theta": 10000.0, "sliding_window": 4096},
    "mistral_7b_v0_3": _MISTRAL
    | _sizes(32, 4096, 32, 8, 14336)
    | {"vocab_size": 32768, "rope_theta": 1000000.0},
    "qwen3_0_6b": _QWEN3 | _sizes(28, 1024, 16, 8, 3072) | _TIED,
    "qwen3_1_7b": _QWEN3 | _sizes(28, 2048, 16, 8, 6144) | _TIED,
    "qwen3_4b": _QWEN3 | _sizes(36, 2560, 32, 8, 9728) | _TIED,
    "qwen3_8b": _QWEN3 | _sizes(36, 4096, 32, 8, 12288),
    "qwen3_14b": _QWEN3 | _sizes(40, 5120, 40, 8, 17408),
    "qwen3_32b": _QWEN3 | _sizes(64, 5120, 64, 8, 25600),
    # d_ff is in its config.json, although the model has no dense layers.
    "qwen3_30b_a3b": _QWEN3 | _sizes(48, 2048, 32, 4, 6144) | _QWEN3_MOE,
    "qwen3_debugmodel": _QWEN3
    | _sizes(8, 256, 16, 8, 3072)
    | _TIED
    | _DEBUG
    | {"max_seq_len": 4096},
}
