"""EXAONE 4: norms of what layers return alone; with windows, other layers have no positions."""

from typing import ClassVar

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.families.olmo2 import Olmo2Format
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.variant import Variant


class Exaone4Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: an EXAONE 4, by preset or by size."""

    family: str = "exaone4"
    rope_theta: PositiveFloat = 1e6
    qk_norm: bool = True

    VARIANT: ClassVar[Variant] = Variant(has_pre_norms=False, has_post_norms=True)

    @property
    def has_positions(self) -> bool:
        """Whether the layers of a configuration from `of_kind` rotate queries and keys."""
        return not self.global_every or self.sliding_window > 0


class Exaone4Format(LlamaFormat):
    """`Exaone4ForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Exaone4ForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "exaone4"
    MODELS: ClassVar[str] = "an EXAONE 4"
    LAYER: ClassVar[Names] = Olmo2Format.LAYER
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096
    }  # fmt: skip
    WINDOWS: ClassVar[int | None] = 4
    READ: ClassVar[tuple[str, ...]] = ("sliding_window_pattern",)
    CHOICES: ClassVar[Fields] = choices("sliding_window", "global_every", qk_norm=True)


FORMATS = (Exaone4Format(),)
_SHARED = {"vocab_size": 102400, "rope_factor": 16.0}
_SMALL = {"head_dim": 64, "max_seq_len": 65536, "tie_embeddings": True}
_LARGE = {"head_dim": 128, "max_seq_len": 131072, "sliding_window": 4096, "global_every": 4}
EXAONE4 = ModelFamily(
    "exaone4",
    Exaone4Config,
    {
        "exaone4_1_2b": decoder_sizes(30, 2048, 32, 8, 4096) | _SHARED | _SMALL,
        "exaone4_32b": decoder_sizes(64, 5120, 40, 8, 27392) | _SHARED | _LARGE,
    },
    huggingface=__name__,
)
