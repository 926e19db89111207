"""Names and config.json of gpt-oss at Hugging Face: the fields of transformers' `GptOssConfig`.

Its files hold the matrices of experts in MXFP4, which `TensorFiles` reads; exports hold them as the
other tensors.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxpipe.model.families.gpt_oss.config import GptOssConfig
from jaxpipe.model.families.llama.architectures.qwen2 import Qwen2Format
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.layers.gated import CLAMP, SLOPE
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor


def _gate_up(name: str, part: int) -> HuggingFaceTensor:
    """Columns 0, 2, ... of the tensor are the gate's, the others those of up."""
    return HuggingFaceTensor(f"mlp.experts.{name}", part=part, groups="expert_width")


_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_ONLY = {**experts.ONLY_OURS, "norm_topk_prob": True, "moe_every": 1, "first_dense_layers": 0}


class GptOssFormat(LlamaFormat):
    """`GptOssForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("GptOssForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "gpt_oss"
    MODELS: ClassVar[str] = "a gpt-oss"
    LAYER: ClassVar[Names] = {
        **Qwen2Format.LAYER,
        "attn/bo": HuggingFaceTensor("self_attn.o_proj.bias"),
        "attn/sinks": HuggingFaceTensor("self_attn.sinks"),
        "moe/router/gate": HuggingFaceTensor("mlp.router.weight", transposed=True),
        "moe/router/bias": HuggingFaceTensor("mlp.router.bias"),
        "moe/experts/w_gate": _gate_up("gate_up_proj", 0),
        "moe/experts/w_up": _gate_up("gate_up_proj", 1),
        "moe/experts/b_gate": _gate_up("gate_up_proj_bias", 0),
        "moe/experts/b_up": _gate_up("gate_up_proj_bias", 1),
        "moe/experts/w_down": HuggingFaceTensor("mlp.experts.down_proj"),
        "moe/experts/b_down": HuggingFaceTensor("mlp.experts.down_proj_bias"),
    }
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "rope_theta": 150000.0,
        "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "sliding_window": 128,
        "rope_scaling": _ROPE,
    }  # fmt: skip
    WINDOWS: ClassVar[int | None] = 2
    CHOICES: ClassVar[Fields] = choices(
        "sliding_window", "global_every", "n_experts", qkv_bias=True
    )
    ABSENT: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (SLOPE,),
        "swiglu_limit": (CLAMP,),
    }
    READ: ClassVar[tuple[str, ...]] = (
        "num_experts", "experts_per_token", "initial_context_length", *experts.READ,
    )  # fmt: skip
    QUANTISED: ClassVar[str] = "mxfp4"
    WRITTEN: ClassVar[Fields] = {
        "hidden_act": "silu", "attention_bias": True, "swiglu_limit": CLAMP,
    }  # fmt: skip

    def with_defaults(self, theirs: Fields) -> Fields:
        """As of any Llama; a `rope_scaling` of null is that of gpt-oss, as if it were absent."""
        described = super().with_defaults(theirs)
        if described.get("rope_parameters"):  # which holds all of them, in files of version 5
            return {**described, "rope_scaling": theirs.get("rope_scaling")}
        return {**described, "rope_scaling": described["rope_scaling"] or _ROPE}

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The experts."""
        return {
            "n_experts": theirs.get("num_experts", theirs["num_local_experts"]),
            "experts_per_token": theirs["num_experts_per_tok"],
            "d_expert": theirs.get("intermediate_size"),
            **_ONLY,
        }

    def trained(self, theirs: Fields, model: GptOssConfig) -> dict[str, Any]:
        """The weight of the router's loss."""
        return experts.trained(theirs, model)

    def own_written(self, model: GptOssConfig) -> dict[str, Any]:
        """The experts; raises `ValueError` where gpt-oss cannot express them."""
        experts.check_expressible(model, _ONLY | {"d_expert": model.d_ff}, "gpt-oss")
        unscaled = {"rope_type": "default", "rope_theta": model.rope_theta}
        return {
            **({"rope_scaling": unscaled} if model.rope_factor == model.rotary_scale == 1 else {}),
            "num_local_experts": model.n_experts,
            "num_experts_per_tok": model.experts_per_token,
            **experts.written_loss(model),
        }


FORMATS = (GptOssFormat(),)
