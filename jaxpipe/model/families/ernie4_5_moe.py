"""ERNIE 4.5 with experts: Llama's layers, neighbouring dims rotated, biases on the choice alone."""

from typing import Any, ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.variant import Variant


class Ernie45MoeConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: an ERNIE 4.5 with experts, by preset or by size."""

    family: str = "ernie4_5_moe"
    tie_embeddings: bool = True
    rope_theta: PositiveFloat = 500000.0
    n_experts: Positive
    experts_per_token: Positive = 6
    shared_experts: Count = 2
    first_dense_layers: Count = 1
    router_bias: bool = True

    VARIANT: ClassVar[Variant] = Variant(rotates_neighbours=True)


class Ernie45MoeFormat(LlamaFormat):
    """`Ernie4_5_MoeForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Ernie4_5_MoeForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "ernie4_5_moe"
    MODELS: ClassVar[str] = "an ERNIE 4.5 with experts"
    LAYER: ClassVar[Names] = {**LlamaFormat.LAYER, **experts.LAYER, **experts.SHARED}
    FUSED: ClassVar[Names] = experts.FUSED
    VARIABLES: ClassVar[Names] = {
        "router_bias": HuggingFaceTensor("mlp.moe_statics.e_score_correction_bias", ones=(0,))
    }
    FIELDS: ClassVar[Fields] = {
        "moe_num_experts": "n_experts", "moe_k": "experts_per_token",
        "moe_intermediate_size": "d_expert", "moe_num_shared_experts": "shared_experts",
        "moe_layer_start_index": "first_dense_layers",
    }  # fmt: skip
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_theta": 500000.0, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    }  # fmt: skip
    ABSENT: ClassVar[Fields] = {
        **LlamaFormat.ABSENT, "use_bias": (False,), "moe_layer_interval": (1,),
        "moe_norm_min": (1e-12,), "moe_use_aux_free": (True,), "num_nextn_predict_layers": (0,),
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef",)
    CHOICES: ClassVar[Fields] = choices(
        "n_experts", router_score="softmax", router_bias=True, norm_topk_prob=True,
        router_scale=1.0, expert_groups=1, moe_every=1,
    )  # fmt: skip
    WRITTEN: ClassVar[Fields] = {"hidden_act": "silu", "use_bias": False}

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """Refuses dense layers at the end."""
        last = theirs["moe_layer_end_index"]
        if last not in (-1, theirs["num_hidden_layers"] - 1):
            raise ValueError(
                f"has moe_layer_end_index={last} of {theirs['num_hidden_layers']} layers, but here "
                f"the last layers have experts: take another checkpoint."
            )
        return {}

    def ignores(self, name: str, model: LlamaConfig) -> bool:
        """Whether a tensor is of the layers that predict further tokens."""
        return name.removeprefix(self.BASE).startswith("mtp_")


FORMATS = (Ernie45MoeFormat(),)
ERNIE4_5_MOE = ModelFamily(
    "ernie4_5_moe",
    Ernie45MoeConfig,
    {
        "ernie4_5_21b_a3b": decoder_sizes(28, 2560, 20, 4, 12288)
        | {"head_dim": 128, "vocab_size": 103424, "n_experts": 64, "d_expert": 1536}
        | {"max_seq_len": 131072},
        "ernie4_5_300b_a47b": decoder_sizes(54, 8192, 64, 8, 28672)
        | {"head_dim": 128, "vocab_size": 103424, "n_experts": 64, "d_expert": 3584}
        | {"experts_per_token": 8, "shared_experts": 0, "first_dense_layers": 3}
        | {"tie_embeddings": False, "max_seq_len": 131072},
    },
    huggingface=__name__,
)
