"""Llama 3, 3.1 and 3.2."""

from jaxpipe.model.families.llama.huggingface import LlamaFormat
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes


class Llama3Format(LlamaFormat):
    """`LlamaForCausalLM`; a Mistral without a window is the same model."""


_LLAMA3 = {
    "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "head_dim": 128,
    "max_seq_len": 8192,
}  # fmt: skip
_LLAMA3_1 = _LLAMA3 | {"rope_factor": 8.0, "max_seq_len": 131072}
_LLAMA3_2 = _LLAMA3 | {"rope_factor": 32.0, "max_seq_len": 131072, "tie_embeddings": True}
_KEMPNER = _LLAMA3 | {"max_seq_len": 4096}
_DEBUG = {"vocab_size": 2048, "head_dim": 16}  # torchtitan's model for tests

PRESETS: dict[str, Preset] = {
    "llama3_8b": _LLAMA3 | decoder_sizes(32, 4096, 32, 8, 14336),
    "llama3_70b": _LLAMA3 | decoder_sizes(80, 8192, 64, 8, 28672),
    "llama3_1_8b": _LLAMA3_1 | decoder_sizes(32, 4096, 32, 8, 14336),
    "llama3_1_70b": _LLAMA3_1 | decoder_sizes(80, 8192, 64, 8, 28672),
    "llama3_1_405b": _LLAMA3_1 | decoder_sizes(126, 16384, 128, 8, 53248),
    "llama3_2_1b": _LLAMA3_2 | decoder_sizes(16, 2048, 32, 8, 8192) | {"head_dim": 64},
    "llama3_2_3b": _LLAMA3_2 | decoder_sizes(28, 3072, 24, 8, 8192),
    "llama3_debugmodel": _LLAMA3_1 | decoder_sizes(6, 256, 16, 16, 768) | _DEBUG,
    "kempner_13b": _KEMPNER | decoder_sizes(40, 5120, 40, 8, 17920),
    "kempner_29b": _KEMPNER | decoder_sizes(56, 6144, 48, 8, 21504),
}
