"""Qwen3.5, dense or with experts: Qwen3-Next's layers, whose tensors have other names."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.architectures.qwen3 import Qwen3Format
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.families.qwen3_next import huggingface as qwen3_next
from jaxpipe.model.families.qwen3_next.config import QWEN3_NEXT, Qwen3NextConfig
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.prediction import huggingface as prediction
from jaxpipe.model.published import HuggingFaceTensor, fused
from jaxpipe.model.recurrent.huggingface import attention_every, layer_types

_OWN = ("mrope_section", "mrope_interleaved")  # of rope_parameters: where images are, alone


class Qwen35Config(Qwen3NextConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: the text model of a Qwen3.5, by preset or by size."""

    family: str = "qwen3_5"
    n_experts: Count = 0
    experts_per_token: Positive = 1
    shared_experts: Count = 0


class Qwen35Format(qwen3_next.Qwen3NextFormat):
    """`Qwen3_5ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen3_5_text"
    MODELS: ClassVar[str] = "a Qwen3.5"
    LAYER: ClassVar[Names] = prediction.with_prediction_apart(
        {
            **Qwen3Format.LAYER,
            **qwen3_next.SHARED,
            **fused("linear_attn.in_proj_qkv.weight", "delta/wq", "delta/wk", "delta/wv"),
            "delta/wz": HuggingFaceTensor("linear_attn.in_proj_z.weight", transposed=True),
            "delta/rate": HuggingFaceTensor("linear_attn.in_proj_b.weight", transposed=True),
            "delta/decay": HuggingFaceTensor("linear_attn.in_proj_a.weight", transposed=True),
        }
    )
    FUSED: ClassVar[Names] = {}
    DEFAULTS: ClassVar[Fields] = {**qwen3_next.DELTA, "num_key_value_heads": 4, "head_dim": 256}
    CHOICES: ClassVar[Fields] = choices("rotary_share", qk_norm=True)
    READ: ClassVar[tuple[str, ...]] = (  # of layers that predict further tokens, or without effect
        *Qwen3Format.READ, "attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    )  # fmt: skip

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults, and without the positions of images."""
        found = dict(super().with_defaults(theirs))
        if rope := found.get("rope_parameters"):
            found["rope_parameters"] = {k: v for k, v in rope.items() if k not in _OWN}
        return found

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """Which layers have attention."""
        return {"attention_every": attention_every(theirs)}

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """Nothing: a router's loss is of experts."""
        return {}

    def own_written(self, model: Qwen35Config) -> dict[str, Any]:
        """The type of every layer, and how many further tokens are predicted."""
        prediction.check_depth(model)
        return {"layer_types": layer_types(model), "mtp_num_hidden_layers": model.mtp_depth}


class Qwen35MoeFormat(Qwen35Format):
    """`Qwen3_5MoeForCausalLM`, every layer of which has experts."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen3_5_moe_text"
    MODELS: ClassVar[str] = "a Qwen3.5-MoE"
    LAYER: ClassVar[Names] = {
        **Qwen35Format.LAYER, **experts.LAYER, **prediction.apart(experts.LAYER)
    }  # fmt: skip
    FUSED: ClassVar[Names] = qwen3_next.FUSED
    SIZES: ClassVar[Fields] = {
        name: ours for name, ours in LlamaFormat.SIZES.items() if name != "intermediate_size"
    }
    DEFAULTS: ClassVar[Fields] = {
        **Qwen35Format.DEFAULTS, "num_key_value_heads": 2, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("rotary_share", "n_experts", qk_norm=True)
    READ: ClassVar[tuple[str, ...]] = *Qwen35Format.READ, *experts.READ
    FIELDS: ClassVar[Fields] = {
        **Qwen35Format.FIELDS, "num_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "d_expert",
    }  # fmt: skip

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The experts, and which layers have attention; no layer has an MLP of a width `d_ff`."""
        return {
            **super().own_expected(theirs), **_ONLY, "d_ff": theirs["moe_intermediate_size"],
            "shared_experts": qwen3_next.shared_experts(theirs),
        }  # fmt: skip

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """The weight of the router's loss."""
        return experts.trained(theirs, model)

    def own_written(self, model: Qwen35Config) -> dict[str, Any]:
        """The experts, and what is written without them."""
        experts.check_expressible(model, _ONLY | {"d_ff": model.expert_width}, self.MODELS)
        return {
            **super().own_written(model), **experts.written_loss(model),
            "shared_expert_intermediate_size": model.shared_experts * model.expert_width,
        }  # fmt: skip


_ONLY = {**qwen3_next.ONLY, "norm_topk_prob": True, "moe_every": 1, "first_dense_layers": 0}
FORMATS = (Qwen35Format(), Qwen35MoeFormat())
_BOTH = {"head_dim": 256, "vocab_size": 248320, "max_seq_len": 262144}
QWEN3_5 = ModelFamily(
    "qwen3_5",
    Qwen35Config,
    {
        "qwen3_5_9b": decoder_sizes(32, 4096, 16, 4, 12288) | _BOTH,
        "qwen3_5_35b_a3b": decoder_sizes(40, 2048, 16, 2, 512)
        | _BOTH
        | {"n_experts": 256, "experts_per_token": 8, "d_expert": 512, "shared_experts": 1},
        "qwen3_5_397b_a17b": decoder_sizes(60, 4096, 32, 2, 1024)
        | _BOTH
        | {"n_experts": 512, "experts_per_token": 10, "d_expert": 1024, "shared_experts": 1}
        | {"delta_value_heads": 64},
    },
    model=QWEN3_NEXT.model,
    huggingface=__name__,
)
