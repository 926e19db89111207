"""Names and config.json of OLMo Hybrid at Hugging Face: of `OlmoHybridConfig`."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, Names, choices
from jaxpipe.model.families.olmo2 import Olmo2Format
from jaxpipe.model.families.olmo_hybrid.config import OlmoHybridConfig
from jaxpipe.model.families.qwen3_next.huggingface import Qwen3NextFormat
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.recurrent.huggingface import (
    attention_every,
    check_regular,
    layer_types,
    without_positions,
)

_DELTA = "linear_attn."
_MATRICES = {  # by the last part of our path
    **{f"w{one}": f"{one}_proj" for one in "qkvo"}, "wz": "g_proj", "rate": "b_proj",
    "decay": "a_proj",
}  # fmt: skip
_FUSED_TAPS = HuggingFaceTensor(f"{_DELTA}conv1d.weight", transposed=True, ones=(1,))


class OlmoHybridFormat(Olmo2Format):
    """`OlmoHybridForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("OlmoHybridForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "olmo_hybrid"
    MODELS: ClassVar[str] = "an OLMo Hybrid"
    LAYER: ClassVar[Names] = {
        **Olmo2Format.LAYER,
        "attn_norm/scale": HuggingFaceTensor("attention_layer_norm.weight"),
        "mlp_norm/scale": HuggingFaceTensor("feedforward_layer_norm.weight"),
        **{
            f"delta/{ours}": HuggingFaceTensor(f"{_DELTA}{name}.weight", transposed=True)
            for ours, name in _MATRICES.items()
        },
        **{
            f"delta/conv_{one}": _FUSED_TAPS._replace(name=f"{_DELTA}{one}_conv1d.weight")
            for one in "qkv"
        },
        "delta/decay_bias": HuggingFaceTensor(f"{_DELTA}dt_bias"),
        "delta/log_decay": HuggingFaceTensor(f"{_DELTA}A_log"),
        "delta/norm/scale": HuggingFaceTensor(f"{_DELTA}o_norm.weight"),
    }
    # Names of transformers' modules, by which it also saves the norm of what attention returns.
    FUSED: ClassVar[Names] = {
        "attn_norm/scale": HuggingFaceTensor("input_layernorm.weight"),
        "mlp_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
        "attn_post_norm/scale": HuggingFaceTensor("feedforward_layer_norm.weight"),
        **{f"delta/conv_{one}": _FUSED_TAPS._replace(part=i) for i, one in enumerate("qkv")},
    }
    FIELDS: ClassVar[Fields] = Qwen3NextFormat.FIELDS
    DEFAULTS: ClassVar[Fields] = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
    CHOICES: ClassVar[Fields] = choices(qk_norm=True)
    ABSENT: ClassVar[Fields] = {**Olmo2Format.ABSENT, "linear_allow_neg_eigval": (True,)}
    READ: ClassVar[tuple[str, ...]] = (  # the widths, and what is of initial values
        *Olmo2Format.READ, *Qwen3NextFormat.FIELDS, "linear_a_log_min", "linear_a_log_max",
        "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
    )  # fmt: skip

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields.

        Raises `ValueError` where attention rotates queries and keys, as it does by default.
        """
        found = dict(super().with_defaults(theirs))
        theta = rope.rope_fields(found).get("rope_theta", found.get("rope_theta", 10000.0))
        if theta is not None:
            raise ValueError(
                f"has rope_theta={theta}, if by default, but here attention has no positions: "
                f"take a checkpoint with a rope_theta of null."
            )
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            found[name] = found.get(name) or found["num_attention_heads"]
        width = int(0.75 * found["hidden_size"] / found["linear_num_key_heads"])
        found["linear_key_head_dim"] = found.get("linear_key_head_dim") or width
        width = 2 * found["linear_key_head_dim"]
        return found | {"linear_value_head_dim": found.get("linear_value_head_dim") or width}

    def expected(self, theirs: Fields) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies."""
        return without_positions(super().expected(theirs))

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """Which layers have attention."""
        return {"attention_every": attention_every(theirs)}

    def check_types(self, theirs: Fields, found: Fields) -> None:
        """Raise `ValueError` where layers with attention are not at regular intervals."""
        check_regular(theirs, found)

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model, whose attention has no positions."""
        found = without_positions(super().written(model, dtype, max_positions))
        return found | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}

    def own_written(self, model: OlmoHybridConfig) -> dict[str, Any]:
        """The type of every layer."""
        return {"layer_types": layer_types(model)}


FORMATS = (OlmoHybridFormat(),)
