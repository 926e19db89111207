"""OLMo 2 (OLMo Team 2025): Llama's layers with norms of what they return alone.

The norms of queries and keys are over all heads together.
"""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.architectures.qwen3 import Qwen3Format
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.variant import Variant


class Olmo2Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: an OLMo 2, by preset or by size."""

    family: str = "olmo2"
    norm_eps: PositiveFloat = 1e-6
    qk_norm: bool = True

    VARIANT: ClassVar[Variant] = Variant(
        has_pre_norms=False, has_post_norms=True, norms_span_heads=True, scales_windows=False
    )


class Olmo2Format(LlamaFormat):
    """`Olmo2ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "olmo2"
    MODELS: ClassVar[str] = "an OLMo 2"
    LAYER: ClassVar[Names] = {
        **Qwen3Format.LAYER,
        "attn_post_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
        "mlp_post_norm/scale": HuggingFaceTensor("post_feedforward_layernorm.weight"),
    }
    DEFAULTS: ClassVar[Fields] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
    CHOICES: ClassVar[Fields] = choices(qk_norm=True)


FORMATS = (Olmo2Format(),)
_SHARED = {"vocab_size": 100352, "max_seq_len": 4096}
OLMO2 = ModelFamily(
    "olmo2",
    Olmo2Config,
    {
        "olmo2_7b": decoder_sizes(32, 4096, 32, 32, 11008) | _SHARED,
        "olmo2_13b": decoder_sizes(40, 5120, 40, 40, 13824) | _SHARED,
        "olmo2_32b": decoder_sizes(64, 5120, 40, 8, 27648) | _SHARED,
    },
    huggingface=__name__,
)
