"""Phi-3 and Phi-4: Llama's layers, which Hugging Face stores with fused matrices."""

from typing import Any, ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.published import check_choices, check_only, fused


class Phi3Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Phi-3 or Phi-4, by preset or by size."""

    family: str = "phi3"
    rope_theta: PositiveFloat = 10000.0


class Phi3Format(LlamaFormat):
    """`Phi3ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Phi3ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "phi3"
    MODELS: ClassVar[str] = "a Phi-3"
    LAYER: ClassVar[Names] = {
        **LlamaFormat.LAYER,
        **fused("self_attn.qkv_proj.weight", "attn/wq", "attn/wk", "attn/wv"),
        **fused("mlp.gate_up_proj.weight", "mlp/w_gate", "mlp/w_up"),
    }
    ROTARY_SHARE: ClassVar[float | None] = 1.0
    DEFAULTS: ClassVar[Fields] = {
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
        "sliding_window": None, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    WINDOWS: ClassVar[int | None] = 0
    CHOICES: ClassVar[Fields] = choices("sliding_window", "rotary_share")

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """Nothing; raises `ValueError` where positions are scaled as in none of these models."""
        scaling = rope.rope_fields(theirs)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        check_only({"rope_type": kind}, {"rope_type": ("longrope", "default")})
        return {}

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json, whose class takes the factor of `longrope` from two lengths."""
        found = super().written(model, dtype, max_positions)
        if not found["rope_scaling"]:
            return found
        factor = max_positions / model.rope_original_positions
        needed = {"rope_scaling": "longrope", "rope_factor": factor, "rope_attention_factor": 0.0}
        check_choices(model, needed, "models of Phi-3")
        lists = "short_factor", "long_factor"
        factors = {name: list(found["rope_scaling"][name]) for name in lists}
        return found | {
            "rope_scaling": {"type": "longrope", **factors},
            "original_max_position_embeddings": model.rope_original_positions,
        }


FORMATS = (Phi3Format(),)
PHI3 = ModelFamily(
    "phi3",
    Phi3Config,
    {
        "phi3_mini": decoder_sizes(32, 3072, 32, 32, 8192)
        | {"vocab_size": 32064, "max_seq_len": 4096, "sliding_window": 2047},
        "phi4": decoder_sizes(40, 5120, 40, 10, 17920)
        | {"vocab_size": 100352, "max_seq_len": 16384, "rope_theta": 250000.0},
    },
    huggingface=__name__,
)
