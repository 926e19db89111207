"""Qwen3: norms of queries and keys."""

from typing import ClassVar

from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.published import HuggingFaceTensor


class Qwen3Format(LlamaFormat):
    """`Qwen3ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen3"
    MODELS: ClassVar[str] = "a Qwen3"
    LAYER: ClassVar[Names] = {
        **LlamaFormat.LAYER,
        "attn/q_norm/scale": HuggingFaceTensor("self_attn.q_norm.weight"),
        "attn/k_norm/scale": HuggingFaceTensor("self_attn.k_norm.weight"),
    }
    DEFAULTS: ClassVar[Fields] = {"num_key_value_heads": 32, "head_dim": 128}
    CHOICES: ClassVar[Fields] = choices(qk_norm=True)
    READ: ClassVar[tuple[str, ...]] = "sliding_window", "max_window_layers"  # without effect
    WRITTEN: ClassVar[Fields] = {
        "hidden_act": "silu", "use_sliding_window": False, "sliding_window": None
    }  # fmt: skip


QWEN3: Preset = {
    "vocab_size": 151936, "rope_theta": 1000000.0, "norm_eps": 1e-6, "head_dim": 128,
    "qk_norm": True, "max_seq_len": 40960,
}  # fmt: skip
_TIED = {"tie_embeddings": True}
_DEBUG = {"vocab_size": 2048, "max_seq_len": 4096}  # torchtitan's model for tests

PRESETS: dict[str, Preset] = {
    "qwen3_0_6b": QWEN3 | decoder_sizes(28, 1024, 16, 8, 3072) | _TIED,
    "qwen3_1_7b": QWEN3 | decoder_sizes(28, 2048, 16, 8, 6144) | _TIED,
    "qwen3_4b": QWEN3 | decoder_sizes(36, 2560, 32, 8, 9728) | _TIED,
    "qwen3_8b": QWEN3 | decoder_sizes(36, 4096, 32, 8, 12288),
    "qwen3_14b": QWEN3 | decoder_sizes(40, 5120, 40, 8, 17408),
    "qwen3_32b": QWEN3 | decoder_sizes(64, 5120, 64, 8, 25600),
    "qwen3_debugmodel": QWEN3 | decoder_sizes(8, 256, 16, 8, 3072) | _TIED | _DEBUG,
}
