"""Names and config.json of Granite 4.0 H at Hugging Face: of `GraniteMoeHybridConfig`."""

from typing import Any, ClassVar

from jaxpipe.model.families.granite_hybrid.config import GraniteHybridConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import FULL, Fields, Names
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor, fused
from jaxpipe.model.recurrent.huggingface import LINEAR, MambaFormat, layer_types, without_positions

_LETTERS = {LINEAR: "M", "mamba": "M", FULL: "*", "attention": "*"}  # by entry of `layer_types`
_FACTORS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
)  # fmt: skip
_MOE = "block_sparse_moe."
_ONLY = {
    **{name: value for name, value in experts.ONLY_OURS.items() if name != "shared_experts"},
    "norm_topk_prob": True, "moe_every": 1, "first_dense_layers": 0,
}  # fmt: skip


def _mlp(path: str) -> Names:
    """Where an MLP is, which files name alike with experts beside it and without."""
    down = HuggingFaceTensor("shared_mlp.output_linear.weight", transposed=True)
    hidden = fused("shared_mlp.input_linear.weight", f"{path}/w_gate", f"{path}/w_up")
    return {**hidden, f"{path}/w_down": down}


def _experts(hidden: str, down: str, router: str) -> Names:
    """Where all experts of a layer, and the router, are."""
    return {
        **fused(f"{_MOE}{hidden}", "moe/experts/w_gate", "moe/experts/w_up"),
        "moe/experts/w_down": HuggingFaceTensor(f"{_MOE}{down}", transposed=True),
        "moe/router/gate": HuggingFaceTensor(f"{_MOE}{router}", transposed=True),
    }


class GraniteHybridFormat(MambaFormat):
    """`GraniteMoeHybridForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("GraniteMoeHybridForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "granitemoehybrid"
    MODELS: ClassVar[str] = "a Granite 4.0 H"
    LAYER: ClassVar[Names] = {
        **MambaFormat.LAYER, **_mlp("mlp"), **_mlp("moe/shared"),
        **_experts("input_linear.weight", "output_linear.weight", "router.layer.weight"),
    }  # fmt: skip
    FUSED: ClassVar[Names] = _experts("experts.gate_up_proj", "experts.down_proj", "router.weight")
    FIELDS: ClassVar[Fields] = {
        **MambaFormat.FIELDS, "num_local_experts": "n_experts",
        **{name: name for name in _FACTORS},
    }  # fmt: skip
    DEFAULTS: ClassVar[Fields] = {
        **MambaFormat.DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, **dict.fromkeys(_FACTORS, 1.0),
    }  # fmt: skip
    ABSENT: ClassVar[Fields] = {
        **MambaFormat.ABSENT, "position_embedding_type": (None, "nope"),
        "normalization_function": ("rmsnorm",),
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = *MambaFormat.READ, "router_aux_loss_coef"

    def expected(self, theirs: Fields) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies; its positions have no effect."""
        return without_positions(super().expected(theirs))

    def pattern(self, theirs: Fields) -> str:
        """The letters of all layers, by a config.json with all defaults filled in."""
        types = theirs.get("layer_types") or theirs.get("layers_block_type")
        types = types or [LINEAR] * theirs["num_hidden_layers"]
        for other in {*types} - {*_LETTERS}:
            raise ValueError(
                f"has layers of {other}, but this model's are of {LINEAR} and {FULL}: take "
                f"another checkpoint."
            )
        return "".join(_LETTERS[one] for one in types)

    def written_pattern(self, model: GraniteHybridConfig) -> dict[str, Any]:
        """The fields of a config.json that say which layers have attention."""
        return {"layer_types": layer_types(model)}

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The kinds of layers, and the experts, if layers have them."""
        found, shared = super().own_expected(theirs), "shared_intermediate_size"
        if not theirs["num_local_experts"]:
            return found | {"d_ff": theirs[shared]}
        each = experts.shared_count(theirs, shared, "intermediate_size")
        own = {"d_expert": theirs["intermediate_size"], "shared_experts": each, **_ONLY}
        return found | own | {"experts_per_token": theirs["num_experts_per_tok"]}

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """The weight of the router's loss."""
        return experts.trained(theirs, model)

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model, without positions."""
        return without_positions(super().written(model, dtype, max_positions))

    def own_written(self, model: GraniteHybridConfig) -> dict[str, Any]:
        """The kinds of layers, and the width of the MLP, or the experts."""
        found = super().own_written(model)
        if not model.n_experts:
            return found | {"shared_intermediate_size": model.d_ff, "num_experts_per_tok": 0}
        only = _ONLY | {"d_ff": model.expert_width}
        experts.check_expressible(model, only, self.MODELS)
        return found | experts.written_loss(model) | {
            "shared_intermediate_size": model.shared_experts * model.expert_width,
            "num_experts_per_tok": model.experts_per_token,
        }  # fmt: skip


FORMATS = (GraniteHybridFormat(),)
