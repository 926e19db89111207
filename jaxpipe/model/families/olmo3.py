"""OLMo 3: an OLMo 2 with a window in three of four layers, whose wavelengths do not scale."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import FULL, LOCAL, Fields, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.families.olmo2 import Olmo2Config, Olmo2Format
from jaxpipe.model.family import Count, ModelFamily
from jaxpipe.model.layers.rope import huggingface as rope


class Olmo3Config(Olmo2Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: an OLMo 3, by preset or by size."""

    family: str = "olmo3"
    sliding_window: Count = 4096
    global_every: Count = 4


class Olmo3Format(Olmo2Format):
    """`Olmo3ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Olmo3ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "olmo3"
    MODELS: ClassVar[str] = "an OLMo 3"
    DEFAULTS: ClassVar[Fields] = {
        **Olmo2Format.DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0
    }  # fmt: skip
    WINDOWS: ClassVar[int | None] = 4
    CHOICES: ClassVar[Fields] = choices("sliding_window", "global_every", qk_norm=True)

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields, in the form of version 4."""
        found = super().with_defaults(rope.of_layer_types(theirs, FULL, LOCAL))
        if found.get("rope_local_base_freq", found["rope_theta"]) != found["rope_theta"]:
            raise ValueError(
                f"has a rope_theta of {LOCAL} that is not that of {FULL}: take another checkpoint."
            )
        return {**found, "rope_local_base_freq": None}

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json, with the wavelengths of both types of layers as version 5 reads them."""
        found = super().written(model, dtype, max_positions)
        unscaled = {"rope_type": "default", "rope_theta": model.rope_theta}
        scaled = unscaled | (found["rope_scaling"] or {})
        return found | {"rope_parameters": {FULL: scaled, LOCAL: unscaled}}


FORMATS = (Olmo3Format(),)
_SHARED = {
    "vocab_size": 100278, "max_seq_len": 65536, "rope_scaling": "yarn", "rope_factor": 8.0,
    "rope_attention_factor": 1.2079441541679836,
}  # fmt: skip
OLMO3 = ModelFamily(
    "olmo3",
    Olmo3Config,
    {
        "olmo3_7b": decoder_sizes(32, 4096, 32, 32, 11008) | _SHARED,
        "olmo3_32b": decoder_sizes(64, 5120, 40, 8, 27648) | _SHARED,
    },
    huggingface=__name__,
)
