"""Qwen3-MoE: a Qwen3 whose layers have experts."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.architectures.qwen3 import QWEN3, Qwen3Format
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, Names, choices
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.layers.moe import huggingface as experts


class Qwen3MoeFormat(Qwen3Format):
    """`Qwen3MoeForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen3_moe"
    MODELS: ClassVar[str] = "a Qwen3-MoE"
    LAYER: ClassVar[Names] = {**Qwen3Format.LAYER, **experts.LAYER}
    FUSED: ClassVar[Names] = experts.FUSED
    DEFAULTS: ClassVar[Fields] = {"num_key_value_heads": 4, **experts.DEFAULTS}
    READ: ClassVar[tuple[str, ...]] = *Qwen3Format.READ, *experts.READ
    CHOICES: ClassVar[Fields] = choices("n_experts", qk_norm=True)

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The experts."""
        return experts.expected(theirs)

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """The weight of the router's loss."""
        return experts.trained(theirs, model)

    def own_written(self, model: LlamaConfig) -> dict[str, Any]:
        """The experts; raises `ValueError` where Qwen3-MoE cannot express them."""
        return experts.written(model)


PRESETS: dict[str, Preset] = {
    # d_ff is in its config.json, although the model has no dense layers.
    "qwen3_30b_a3b": QWEN3
    | decoder_sizes(48, 2048, 32, 4, 6144)
    | {"n_experts": 128, "experts_per_token": 8, "d_expert": 768},
}
