"""Qwen2.5 and Qwen2: biases on queries, keys and values."""

from typing import ClassVar

from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.published import HuggingFaceTensor


class Qwen2Format(LlamaFormat):
    """`Qwen2ForCausalLM`, which transformers has no window, and no other width of heads, for."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen2"
    MODELS: ClassVar[str] = "a Qwen2.5"
    LAYER: ClassVar[Names] = {
        **LlamaFormat.LAYER,
        "attn/bq": HuggingFaceTensor("self_attn.q_proj.bias"),
        "attn/bk": HuggingFaceTensor("self_attn.k_proj.bias"),
        "attn/bv": HuggingFaceTensor("self_attn.v_proj.bias"),
    }
    DEFAULTS: ClassVar[Fields] = {"num_key_value_heads": 32}
    CHOICES: ClassVar[Fields] = choices(qkv_bias=True)
    READ: ClassVar[tuple[str, ...]] = "sliding_window", "max_window_layers"  # without effect
    WRITTEN: ClassVar[Fields] = {
        "hidden_act": "silu", "use_sliding_window": False, "sliding_window": None
    }  # fmt: skip


_QWEN2_5 = {"norm_eps": 1e-6, "rope_theta": 1e6, "qkv_bias": True, "max_seq_len": 131072}
_SMALL = _QWEN2_5 | {"vocab_size": 151936, "tie_embeddings": True}
_LARGE = _QWEN2_5 | {"vocab_size": 152064}
_SHORT = {"max_seq_len": 32768}
_COARSE = {"norm_eps": 1e-5}  # of the base models; their instruct versions have 1e-6

PRESETS: dict[str, Preset] = {
    "qwen2_5_0_5b": _SMALL | decoder_sizes(24, 896, 14, 2, 4864) | _SHORT,
    "qwen2_5_1_5b": _SMALL | decoder_sizes(28, 1536, 12, 2, 8960),
    "qwen2_5_3b": _SMALL | decoder_sizes(36, 2048, 16, 2, 11008) | _SHORT,
    "qwen2_5_7b": _LARGE | decoder_sizes(28, 3584, 28, 4, 18944),
    "qwen2_5_14b": _LARGE | decoder_sizes(48, 5120, 40, 8, 13824) | _COARSE,
    "qwen2_5_32b": _LARGE | decoder_sizes(64, 5120, 40, 8, 27648) | _COARSE,
    "qwen2_5_72b": _LARGE | decoder_sizes(80, 8192, 64, 8, 29568) | _COARSE,
}
