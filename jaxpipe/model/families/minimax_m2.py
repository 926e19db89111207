"""MiniMax-M2: a Mixtral with norms over all heads, half of each rotated, and sigmoid scores."""

from typing import Any, ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.architectures.mixtral import MixtralFormat
from jaxpipe.model.families.llama.architectures.qwen3 import Qwen3Format
from jaxpipe.model.families.llama.config import LlamaConfig, Share
from jaxpipe.model.families.llama.huggingface import Fields, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily, Positive
from jaxpipe.model.layers.moe.config import RouterScore
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.variant import Variant


class MiniMaxM2Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a MiniMax-M2, by preset or by size; every layer has experts of width `d_ff`."""

    family: str = "minimax_m2"
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 5e6
    qk_norm: bool = True
    rotary_share: Share = 0.5
    n_experts: Positive
    experts_per_token: Positive = 8
    router_score: RouterScore = "sigmoid"
    router_bias: bool = True

    VARIANT: ClassVar[Variant] = Variant(norms_span_heads=True)


class MiniMaxM2Format(MixtralFormat):
    """`MiniMaxM2ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("MiniMaxM2ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "minimax_m2"
    MODELS: ClassVar[str] = "a MiniMax-M2"
    LAYER: ClassVar[Names] = {**Qwen3Format.LAYER, **MixtralFormat.LAYER}
    VARIABLES: ClassVar[Names] = {
        "router_bias": HuggingFaceTensor("block_sparse_moe.e_score_correction_bias")
    }
    ROTARY_SHARE: ClassVar[float | None] = 1.0
    WINDOWS: ClassVar[int | None] = None
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 5e6,
        "num_local_experts": 256, "num_experts_per_tok": 8,
    }  # fmt: skip
    ABSENT: ClassVar[Fields] = {
        **MixtralFormat.ABSENT, "scoring_func": ("sigmoid",), "qk_norm_type": ("per_layer",),
        "use_qk_norm": (True,), "use_routing_bias": (True,), "shared_intermediate_size": (0,),
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = (  # of layers that predict further tokens, or without effect
        *MixtralFormat.READ, "attn_type_list", "use_mtp", "num_mtp_modules", "shared_moe_mode",
        "mtp_transformer_layers", "mlp_intermediate_size", "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta", "layernorm_mlp_beta",
    )  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("rotary_share", "n_experts", qk_norm=True)
    ONLY: ClassVar[Fields] = {
        **MixtralFormat.ONLY, "router_score": "sigmoid", "router_bias": True
    }  # fmt: skip

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults, and a share for the published `rotary_dim`."""
        found = dict(super().with_defaults(theirs))
        if rotated := found.pop("rotary_dim", None):
            found.setdefault("partial_rotary_factor", rotated / found["head_dim"])
        return found

    def own_written(self, model: LlamaConfig) -> dict[str, Any]:
        """The experts, and the width that rotates."""
        return {**super().own_written(model), "rotary_dim": model.rotary_size}


FORMATS = (MiniMaxM2Format(),)
MINIMAX_M2 = ModelFamily(
    "minimax_m2",
    MiniMaxM2Config,
    {
        "minimax_m2": decoder_sizes(62, 3072, 48, 8, 1536)
        | {"head_dim": 128, "vocab_size": 200064, "n_experts": 256, "max_seq_len": 196608},
    },
    huggingface=__name__,
)
