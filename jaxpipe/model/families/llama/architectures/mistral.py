"""Mistral, whose first version has a sliding window."""

from typing import ClassVar

from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, choices
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes


class MistralFormat(LlamaFormat):
    """`MistralForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "mistral"
    MODELS: ClassVar[str] = "a Mistral"
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("sliding_window")
    WINDOWS: ClassVar[int | None] = 0
    WRITTEN: ClassVar[Fields] = {"hidden_act": "silu"}


_MISTRAL = {"norm_eps": 1e-5, "head_dim": 128, "max_seq_len": 32768}
_7B = _MISTRAL | decoder_sizes(32, 4096, 32, 8, 14336)

PRESETS: dict[str, Preset] = {
    "mistral_7b_v0_1": _7B | {"vocab_size": 32000, "rope_theta": 10000.0, "sliding_window": 4096},
    "mistral_7b_v0_3": _7B | {"vocab_size": 32768, "rope_theta": 1000000.0},
}
