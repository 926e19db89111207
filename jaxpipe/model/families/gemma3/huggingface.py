"""Names and config.json of the text models of Gemma 3 at Hugging Face: `Gemma3TextConfig`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxpipe.model.families.gemma3.config import Gemma3Config
from jaxpipe.model.families.llama.architectures.qwen3 import Qwen3Format
from jaxpipe.model.families.llama.huggingface import (
    FULL,
    LOCAL,
    Fields,
    LlamaFormat,
    Names,
    choices,
)
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.published import HuggingFaceTensor, of_text


class Gemma3Format(LlamaFormat):
    """`Gemma3ForCausalLM`, and the text model of `Gemma3ForConditionalGeneration`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = (
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    )  # fmt: skip
    MODEL_TYPE: ClassVar[str] = "gemma3_text"
    MODELS: ClassVar[str] = "a text model of Gemma 3"
    LAYER: ClassVar[Names] = {
        **Qwen3Format.LAYER,
        "attn_post_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
        "mlp_norm/scale": HuggingFaceTensor("pre_feedforward_layernorm.weight"),
        "mlp_post_norm/scale": HuggingFaceTensor("post_feedforward_layernorm.weight"),
    }
    DEFAULTS: ClassVar[Fields] = {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 131072,
        "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    WINDOWS: ClassVar[int | None] = 6
    CHOICES: ClassVar[Fields] = choices("sliding_window", "global_every", qk_norm=True)
    ABSENT: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),  # transformers would ignore it
        "use_bidirectional_attention": (False, None),
    }
    READ: ClassVar[tuple[str, ...]] = (
        "final_logit_softcapping", "sliding_window_pattern", "vision_config", "boi_token_index",
        "eoi_token_index", "image_token_index", "mm_tokens_per_image",
    )  # fmt: skip
    WRITTEN: ClassVar[Fields] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
    }

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields, in the form of version 4.

        Version 5 has `rope_parameters` for each type of layer.
        """
        return super().with_defaults(rope.of_layer_types(of_text(theirs), FULL, LOCAL))

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """Wavelengths of layers that have a window, scale of scores, cap of logits."""
        return {
            "logit_softcap": theirs.get("final_logit_softcapping") or 0.0,
            "rope_local_theta": theirs["rope_local_base_freq"],
            "query_width": theirs["query_pre_attn_scalar"],
        }

    def own_written(self, model: Gemma3Config) -> dict[str, Any]:
        """Wavelengths of layers that have a window, scale of scores, cap of logits."""
        return {
            "final_logit_softcapping": model.logit_softcap or None,
            "rope_local_base_freq": model.rope_local_theta,
            "query_pre_attn_scalar": model.query_width or model.head_size,
        }


FORMATS = (Gemma3Format(),)
