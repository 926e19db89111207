"""Sizes and choices of a Qwen3-Next, and the published models."""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import Share
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe.config import NotNegative
from jaxpipe.model.prediction.config import Depth, PredictingConfig
from jaxpipe.model.recurrent.delta_config import DeltaConfig
from jaxpipe.model.variant import Variant


class Qwen3NextConfig(
    PredictingConfig, DeltaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`[model]`: a Qwen3-Next, by preset or by size; most layers have a gated delta network."""

    family: str = "qwen3_next"
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e7
    rotary_share: Share = 0.25
    qk_norm: bool = True
    n_experts: Positive
    experts_per_token: Positive = 10
    shared_experts: Count = 1
    # number of further tokens that each position predicts in training (multi-token prediction), by
    # a layer with attention; published files have 1; 0: none
    mtp_depth: Depth = 0
    mtp_weight: NotNegative = 0.1  # weight of the mean loss of further tokens

    VARIANT: ClassVar[Variant] = Variant(
        norm_offset=1.0, has_output_gate=True, has_shared_gate=True
    )


_80B = decoder_sizes(48, 2048, 16, 2, 5120) | {
    "head_dim": 256, "vocab_size": 151936, "max_seq_len": 262144, "n_experts": 512,
    "experts_per_token": 10, "d_expert": 512, "shared_experts": 1,
}  # fmt: skip

PRESETS: dict[str, Preset] = {"qwen3_next_80b_a3b": _80B}
QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    Qwen3NextConfig,
    PRESETS,
    model="jaxpipe.model.families.qwen3_next.decoder:Qwen3NextDecoder",
    huggingface="jaxpipe.model.families.qwen3_next.huggingface",
)
