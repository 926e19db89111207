"""Names and config.json of the text models of Llama 4 at Hugging Face: `Llama4TextConfig`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxpipe.model.families.llama.config import LOCAL
from jaxpipe.model.families.llama.huggingface import FULL, Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor

CHUNKED = "chunked_attention"  # entry of `layer_types`


def _mlp(ours: str, theirs: str) -> Names:
    return {
        f"{ours}/w_{name}": HuggingFaceTensor(f"{theirs}.{name}_proj.weight", transposed=True)
        for name in ("gate", "up", "down")
    }


_ONLY = {
    **experts.ONLY_OURS, "router_score": "sigmoid", "norm_topk_prob": False, "shared_experts": 1,
    "first_dense_layers": 0,
}  # fmt: skip


class Llama4Format(LlamaFormat):
    """`Llama4ForCausalLM`, and the text model of `Llama4ForConditionalGeneration`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = (
        "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    )  # fmt: skip
    MODEL_TYPE: ClassVar[str] = "llama4_text"
    MODELS: ClassVar[str] = "a text model of Llama 4"
    LAYER: ClassVar[Names] = {
        **{path: at for path, at in LlamaFormat.LAYER.items() if not path.startswith("mlp/")},
        **_mlp("mlp", "feed_forward"),
        **_mlp("moe/shared", "feed_forward.shared_expert"),
        "moe/router/gate": HuggingFaceTensor("feed_forward.router.weight", transposed=True),
        "moe/experts/w_gate": HuggingFaceTensor("feed_forward.experts.gate_up_proj"),
        "moe/experts/w_up": HuggingFaceTensor("feed_forward.experts.gate_up_proj", part=1),
        "moe/experts/w_down": HuggingFaceTensor("feed_forward.experts.down_proj"),
    }
    SIZES: ClassVar[Mapping[str, str]] = {
        **LlamaFormat.SIZES,
        "intermediate_size_mlp": "d_ff",
        "intermediate_size": "d_expert",
        "num_local_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
        "interleave_moe_layer_step": "moe_every",
        "use_qk_norm": "qk_l2_norm",
        "floor_scale": "temperature_floor",
    }
    DEFAULTS: ClassVar[Fields] = {
        "intermediate_size_mlp": 16384, "intermediate_size": 8192, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "head_dim": 128,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = (
        "vision_config", "boi_token_index", "eoi_token_index", "image_token_index",
        "router_jitter_noise", "router_aux_loss_coef",
    )  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("n_experts")

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields, and no lists of layers.

        Raises `ValueError` where these lists are irregular.
        """
        found = dict(super().with_defaults(theirs))
        layers = range(1, found["num_hidden_layers"] + 1)
        rotates = found.pop("no_rope_layers", None)  # 1 at layers that have positions
        if rotates:
            found["no_rope_layer_interval"] = rotates.index(0) + 1 if 0 in rotates else 0
        every, step = found["no_rope_layer_interval"], found["interleave_moe_layer_step"]
        regular = [int(not every or i % every > 0) for i in layers]
        chunked = CHUNKED if found["attention_chunk_size"] else FULL
        for name, listed, wanted in (
            ("no_rope_layers", rotates, regular),
            ("layer_types", found.pop("layer_types", None), [(FULL, chunked)[i] for i in regular]),
            ("moe_layers", found.pop("moe_layers", None), [i - 1 for i in layers if i % step == 0]),
        ):
            if listed and listed != wanted:
                raise ValueError(
                    f"has {name} that are not at regular intervals, or do not fit the chunks, as "
                    f"those of this model do: take another checkpoint."
                )
        return found

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The chunks, the layers without positions, their temperature, and the experts."""
        tuned = theirs["attn_temperature_tuning"]
        return {
            "attention_chunk": theirs["attention_chunk_size"] or 0,
            "nope_every": theirs["no_rope_layer_interval"],
            "temperature_scale": theirs["attn_scale"] if tuned else 0.0,
            **_ONLY,
        }

    def own_written(self, model: Llama4Config) -> dict[str, Any]:
        """The same; raises `ValueError` where Llama 4 cannot express the experts."""
        experts.check_expressible(model, _ONLY, "Llama 4")
        kinds = model.layer_kinds
        local = [int(kind.startswith(LOCAL)) for kind in kinds]
        chunked = CHUNKED if model.attention_chunk else FULL
        return {
            "attention_chunk_size": model.attention_chunk or None,
            "no_rope_layers": local,
            "layer_types": [(FULL, chunked)[i] for i in local],
            "moe_layers": [*model.sparse_layers],
            "attn_temperature_tuning": model.temperature_scale > 0,
            "attn_scale": model.temperature_scale,
        }


FORMATS = (Llama4Format(),)
