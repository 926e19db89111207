"""GLM-4.5 and GLM-4.6: Llama's layers with DeepSeek-V3's experts, half of each head rotated."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.architectures.qwen2 import Qwen2Format
from jaxpipe.model.families.llama.architectures.qwen3 import Qwen3Format
from jaxpipe.model.families.llama.config import LlamaConfig, Share
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.layers.moe.config import NotNegative, RouterScore
from jaxpipe.model.prediction import huggingface as prediction
from jaxpipe.model.prediction.config import Depth, PredictingConfig


class Glm4MoeConfig(
    PredictingConfig, LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`[model]`: a GLM-4.5, by preset or by size."""

    family: str = "glm4_moe"
    qkv_bias: bool = True
    rotary_share: Share = 0.5
    n_experts: Positive
    experts_per_token: Positive = 8
    shared_experts: Positive = 1
    first_dense_layers: Count = 1
    router_score: RouterScore = "sigmoid"
    router_bias: bool = True
    # number of further tokens that each position predicts in training (multi-token prediction);
    # published files have 1; 0: none
    mtp_depth: Depth = 0
    mtp_weight: NotNegative = 0.1  # weight of the mean loss of further tokens


class Glm4MoeFormat(LlamaFormat):
    """`Glm4MoeForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "glm4_moe"
    MODELS: ClassVar[str] = "a GLM-4.5"
    LAYER: ClassVar[Names] = prediction.with_prediction(
        {**Qwen2Format.LAYER, **Qwen3Format.LAYER, **experts.LAYER, **experts.SHARED}
    )
    FUSED: ClassVar[Names] = experts.FUSED
    VARIABLES: ClassVar[Names] = experts.VARIABLES
    FIELDS: ClassVar[Fields] = {
        **experts.FIELDS, "attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"
    }  # fmt: skip
    ROTARY_SHARE: ClassVar[float | None] = 0.5
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False,
        "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = "num_nextn_predict_layers", "num_mtp_layers"
    CHOICES: ClassVar[Fields] = choices(
        "qk_norm", "qkv_bias", "rotary_share", "n_experts", router_score="sigmoid",
        router_bias=True, moe_every=1, group_score_experts=2,
    )  # fmt: skip
    WRITTEN: ClassVar[Fields] = {"hidden_act": "silu"}

    def ignores(self, name: str, model: Glm4MoeConfig) -> bool:
        """Whether a tensor is of a layer that predicts a further token, and is not the model's."""
        return prediction.ignores(name, model)

    def own_written(self, model: Glm4MoeConfig) -> dict[str, Any]:
        """How many further tokens are predicted; raises `ValueError` for more than one."""
        prediction.check_depth(model)
        return {"num_nextn_predict_layers": model.mtp_depth}


FORMATS = (Glm4MoeFormat(),)
_SHARED = {"head_dim": 128, "vocab_size": 151552, "rope_theta": 1e6, "max_seq_len": 131072}
_AIR = {"n_experts": 128, "d_expert": 1408}
_LARGE = {
    "n_experts": 160, "d_expert": 1536, "first_dense_layers": 3, "router_scale": 2.5,
    "qk_norm": True,
}  # fmt: skip
GLM4_MOE = ModelFamily(
    "glm4_moe",
    Glm4MoeConfig,
    {
        "glm4_5_air": decoder_sizes(46, 4096, 96, 8, 10944) | _SHARED | _AIR,
        "glm4_5": decoder_sizes(92, 5120, 96, 8, 12288) | _SHARED | _LARGE,
    },
    model="jaxpipe.model.prediction.decoder:PredictingDecoder",
    huggingface=__name__,
)
