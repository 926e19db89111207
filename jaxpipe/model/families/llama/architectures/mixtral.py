"""Mixtral: a Mistral whose layers all have experts as wide as its MLP."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.architectures.mistral import MistralFormat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor

_EXPERTS = {
    "moe/router/gate": HuggingFaceTensor("block_sparse_moe.gate.weight", transposed=True),
    "moe/experts/w_gate": HuggingFaceTensor(
        "block_sparse_moe.experts.{}.w1.weight", transposed=True
    ),
    "moe/experts/w_up": HuggingFaceTensor("block_sparse_moe.experts.{}.w3.weight", transposed=True),
    "moe/experts/w_down": HuggingFaceTensor(
        "block_sparse_moe.experts.{}.w2.weight", transposed=True
    ),
}


class MixtralFormat(MistralFormat):
    """`MixtralForCausalLM`; version 5 of transformers may save experts as one tensor.

    Attributes:
      ONLY: fields of `[model]` of the experts that have one value.
    """

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "mixtral"
    MODELS: ClassVar[str] = "a Mixtral"
    LAYER: ClassVar[Names] = {**LlamaFormat.LAYER, **_EXPERTS}
    FUSED: ClassVar[Names] = {
        **experts.FUSED, "moe/router/gate": experts.LAYER["moe/router/gate"]
    }  # fmt: skip
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "sliding_window": None, "num_experts_per_tok": 2,
        "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    # A token's weights are softmaxes over its own experts: shares of all, divided by their sum.
    ONLY: ClassVar[Fields] = {
        **experts.ONLY_OURS, "norm_topk_prob": True, "moe_every": 1, "first_dense_layers": 0
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = "num_experts", *experts.READ
    CHOICES: ClassVar[Fields] = choices("sliding_window", "n_experts")
    ABSENT: ClassVar[dict[str, tuple[Any, ...]]] = {
        **LlamaFormat.ABSENT, "router_jitter_noise": (0.0, None)
    }  # fmt: skip

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The experts."""
        return {
            "n_experts": theirs.get("num_experts", theirs["num_local_experts"]),
            "experts_per_token": theirs["num_experts_per_tok"],
            "d_expert": theirs.get("intermediate_size"),
            **self.ONLY,
        }

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """The weight of the router's loss."""
        return experts.trained(theirs, model)

    def own_written(self, model: LlamaConfig) -> dict[str, Any]:
        """The experts; raises `ValueError` where the architecture cannot express them."""
        experts.check_expressible(model, {**self.ONLY, "d_expert": model.d_ff}, self.MODELS)
        return {
            "num_local_experts": model.n_experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_jitter_noise": 0.0,
            **experts.written_loss(model),
        }


_MIXTRAL = {
    "vocab_size": 32000, "norm_eps": 1e-5, "rope_theta": 1e6, "n_experts": 8, "experts_per_token": 2
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "mixtral_8x7b": _MIXTRAL | decoder_sizes(32, 4096, 32, 8, 14336) | {"max_seq_len": 32768},
    "mixtral_8x22b": _MIXTRAL | decoder_sizes(56, 6144, 48, 8, 16384) | {"max_seq_len": 65536},
}
