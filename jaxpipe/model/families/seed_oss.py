"""Seed-OSS: a Qwen2.5 with heads of any width."""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.architectures.qwen2 import Qwen2Format
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily


class SeedOssConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Seed-OSS, by preset or by size."""

    family: str = "seed_oss"
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e7
    qkv_bias: bool = True


class SeedOssFormat(LlamaFormat):
    """`SeedOssForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("SeedOssForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "seed_oss"
    MODELS: ClassVar[str] = "a Seed-OSS"
    LAYER: ClassVar[Names] = Qwen2Format.LAYER
    FIELDS: ClassVar[Fields] = {"attention_bias": "qkv_bias"}
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True
    }  # fmt: skip
    ABSENT: ClassVar[Fields] = {**LlamaFormat.ABSENT, "attention_out_bias": (False,)}
    CHOICES: ClassVar[Fields] = choices("qkv_bias")
    WRITTEN: ClassVar[Fields] = {**LlamaFormat.WRITTEN, "attention_out_bias": False}


FORMATS = (SeedOssFormat(),)
SEED_OSS = ModelFamily(
    "seed_oss",
    SeedOssConfig,
    {
        "seed_oss_36b": decoder_sizes(64, 5120, 80, 8, 27648)
        | {"head_dim": 128, "vocab_size": 155136, "max_seq_len": 524288},
    },
    huggingface=__name__,
)
