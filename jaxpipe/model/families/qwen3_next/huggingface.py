"""Names and config.json of Qwen3-Next at Hugging Face: those of transformers' `Qwen3NextConfig`."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.architectures.qwen3_moe import Qwen3MoeFormat
from jaxpipe.model.families.llama.huggingface import Fields, Names, choices
from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.prediction import huggingface as prediction
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.recurrent.huggingface import attention_every, check_regular, layer_types

_OF_DELTA = "linear_attn."
_CONVOLUTION = HuggingFaceTensor(f"{_OF_DELTA}conv1d.weight", transposed=True, ones=(1,))


def grouped(name: str, groups: str, *paths: str) -> Names:
    """The transposed tensor of that name holds the parameters at these paths in groups."""
    return {
        path: HuggingFaceTensor(name, transposed=True, part=i, groups=groups)
        for i, path in enumerate(paths)
    }


# What Qwen3.5 names alike.
SHARED: Names = {
    **grouped("self_attn.q_proj.weight", "n_heads", "attn/wq", "attn/wg"),
    **{f"delta/conv_{one}": _CONVOLUTION._replace(part=i) for i, one in enumerate("qkv")},
    "delta/decay_bias": HuggingFaceTensor(f"{_OF_DELTA}dt_bias"),
    "delta/log_decay": HuggingFaceTensor(f"{_OF_DELTA}A_log"),
    "delta/norm/scale": HuggingFaceTensor(f"{_OF_DELTA}norm.weight"),
    "delta/wo": HuggingFaceTensor(f"{_OF_DELTA}out_proj.weight", transposed=True),
    "moe/shared/share": HuggingFaceTensor("mlp.shared_expert_gate.weight", transposed=True),
    **{
        f"moe/shared/w_{one}": HuggingFaceTensor(
            f"mlp.shared_expert.{one}_proj.weight", transposed=True
        )
        for one in ("gate", "up", "down")
    },
}
DELTA: Fields = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
FUSED = {**experts.FUSED, **prediction.apart(experts.FUSED)}
ONLY = {name: value for name, value in experts.ONLY_OURS.items() if name != "shared_experts"}


class Qwen3NextFormat(Qwen3MoeFormat):
    """`Qwen3NextForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "qwen3_next"
    MODELS: ClassVar[str] = "a Qwen3-Next"
    LAYER: ClassVar[Names] = prediction.with_prediction_apart({
        **Qwen3MoeFormat.LAYER,
        **SHARED,
        **grouped(
            f"{_OF_DELTA}in_proj_qkvz.weight", "delta_key_heads",
            "delta/wq", "delta/wk", "delta/wv", "delta/wz",
        ),
        **grouped(
            f"{_OF_DELTA}in_proj_ba.weight", "delta_key_heads", "delta/rate", "delta/decay"
        ),
    })  # fmt: skip
    FUSED: ClassVar[Names] = FUSED
    FIELDS: ClassVar[Fields] = {
        "linear_num_key_heads": "delta_key_heads",
        "linear_num_value_heads": "delta_value_heads",
        "linear_key_head_dim": "delta_key_dim",
        "linear_value_head_dim": "delta_value_dim",
        "linear_conv_kernel_dim": "delta_taps",
    }
    ROTARY_SHARE: ClassVar[float | None] = 0.25
    DEFAULTS: ClassVar[Fields] = {
        **experts.DEFAULTS, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, **DELTA,
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("rotary_share", "n_experts", qk_norm=True)
    READ: ClassVar[tuple[str, ...]] = *Qwen3MoeFormat.READ, "num_nextn_predict_layers"

    def ignores(self, name: str, model: Qwen3NextConfig) -> bool:
        """Whether a tensor is of images, or of the layer that predicts a token, if that is not."""
        is_left_out = name.startswith(prediction.APART) and not model.mtp_depth
        return is_left_out or super().ignores(name, model)

    def check_types(self, theirs: Fields, found: Fields) -> None:
        """Raise `ValueError` where layers with attention are not at regular intervals."""
        check_regular(theirs, found)

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The experts, and which layers have attention."""
        own = {"shared_experts": shared_experts(theirs), "attention_every": attention_every(theirs)}
        return {**experts.expected(theirs), **own}

    def own_written(self, model: Qwen3NextConfig) -> dict[str, Any]:
        """The experts, the type of every layer, and how many further tokens are predicted."""
        prediction.check_depth(model)
        return {
            "num_nextn_predict_layers": model.mtp_depth,
            **experts.written(model, ONLY, self.MODELS),
            "shared_expert_intermediate_size": model.shared_experts * model.expert_width,
            "layer_types": layer_types(model),
        }


def shared_experts(theirs: Fields) -> int:
    """How many experts are as wide as the shared one, by a config.json with all defaults."""
    width = "shared_expert_intermediate_size"
    return experts.shared_count(theirs, width, "moe_intermediate_size")


FORMATS = (Qwen3NextFormat(),)
