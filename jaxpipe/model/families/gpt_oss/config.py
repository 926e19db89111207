"""Sizes and choices of a gpt-oss, and the published models (OpenAI 2025, sections 2.1 to 2.3)."""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.rope.config import Scaling
from jaxpipe.model.variant import Variant


class GptOssConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a gpt-oss, by preset or by size; every layer has experts of width `d_ff`."""

    family: str = "gpt_oss"
    n_experts: Positive
    experts_per_token: Positive = 4
    rope_theta: PositiveFloat = 150000.0
    rope_scaling: Scaling = "yarn"
    rope_factor: PositiveFloat = 32.0
    rope_original_positions: Positive = 4096
    rope_truncate: bool = False
    sliding_window: Count = 128
    global_every: Count = 2
    qkv_bias: bool = True

    VARIANT: ClassVar[Variant] = Variant(
        "clamped", has_sinks=True, has_out_bias=True, has_expert_biases=True
    )


def _sizes(layers: int, experts: int) -> Preset:
    own = {"head_dim": 64, "vocab_size": 201088, "max_seq_len": 131072, "n_experts": experts}
    return decoder_sizes(layers, 2880, 64, 8, 2880) | own


PRESETS: dict[str, Preset] = {"gpt_oss_20b": _sizes(24, 32), "gpt_oss_120b": _sizes(36, 128)}
GPT_OSS = ModelFamily(
    "gpt_oss", GptOssConfig, PRESETS, huggingface="jaxpipe.model.families.gpt_oss.huggingface"
)
