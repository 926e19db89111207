"""GLM-4-0414: Llama's layers with more norms, half of each head rotated, and fused matrices."""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.architectures.qwen2 import Qwen2Format
from jaxpipe.model.families.llama.config import LlamaConfig, Share
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.published import HuggingFaceTensor, fused
from jaxpipe.model.variant import Variant


class Glm4Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a GLM-4-0414, by preset or by size."""

    family: str = "glm4"
    rope_theta: PositiveFloat = 10000.0
    rotary_share: Share = 0.5

    VARIANT: ClassVar[Variant] = Variant(has_post_norms=True, rotates_neighbours=True)


class Glm4Format(LlamaFormat):
    """`Glm4ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Glm4ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "glm4"
    MODELS: ClassVar[str] = "a GLM-4"
    LAYER: ClassVar[Names] = {
        **Qwen2Format.LAYER,
        "attn_post_norm/scale": HuggingFaceTensor("post_self_attn_layernorm.weight"),
        "mlp_post_norm/scale": HuggingFaceTensor("post_mlp_layernorm.weight"),
        **fused("mlp.gate_up_proj.weight", "mlp/w_gate", "mlp/w_up"),
    }
    FIELDS: ClassVar[Fields] = {"attention_bias": "qkv_bias"}
    ROTARY_SHARE: ClassVar[float | None] = 0.5
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
        "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("qkv_bias", "rotary_share")


FORMATS = (Glm4Format(),)
GLM4 = ModelFamily(
    "glm4",
    Glm4Config,
    {
        "glm4_32b": decoder_sizes(61, 6144, 48, 2, 23040)
        | {"head_dim": 128, "vocab_size": 151552, "max_seq_len": 32768},
    },
    huggingface=__name__,
)
