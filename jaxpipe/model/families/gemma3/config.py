"""Sizes and choices of a Gemma 3, and the published models (Gemma Team 2025, section 2)."""

from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import Count, ModelFamily
from jaxpipe.model.layers.moe.config import NotNegative
from jaxpipe.model.variant import Variant


class Gemma3Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: the text model of a Gemma 3, by preset or by size."""

    family: str = "gemma3"
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6  # base of the rotary wavelengths of layers without the window
    rope_local_theta: PositiveFloat = 1e4  # the same of the others, whose wavelengths do not scale
    sliding_window: Count = 1024
    global_every: Count = 6
    qk_norm: bool = True
    tie_embeddings: bool = True
    query_width: Count = 0  # scores are divided by its square root; 0: head_dim
    logit_softcap: NotNegative = 0.0  # bound c: logits become c tanh(logit / c); 0: none

    VARIANT: ClassVar[Variant] = Variant(
        "gelu_tanh",
        norm_offset=1.0,
        has_post_norms=True,
        scales_windows=False,
        scales_embedding=True,
    )

    def resolved(self) -> Self:
        """The same configuration with every derived size filled in."""
        return replace(super().resolved(), query_width=self.query_width or self.head_size)

    @property
    def logit_cap(self) -> float:
        """Bound on logits."""
        return self.logit_softcap

    @property
    def query_factor(self) -> float:
        """Factor on queries, besides the 1 / sqrt(head_dim) on scores."""
        return (self.head_size / (self.query_width or self.head_size)) ** 0.5

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: with their window and wavelengths."""
        own = super().of_kind(kind)
        return replace(own, rope_theta=self.rope_local_theta) if own.sliding_window else own


def _sizes(layers: int, width: int, heads: int, kv_heads: int, ffn: int, head: int) -> Preset:
    own = {"head_dim": head, "vocab_size": 262208, "max_seq_len": 131072}
    return decoder_sizes(layers, width, heads, kv_heads, ffn) | own


_LONG = {"rope_scaling": "linear", "rope_factor": 8.0}
_1B = {"vocab_size": 262144, "sliding_window": 512, "max_seq_len": 32768}

PRESETS: dict[str, Preset] = {
    "gemma3_1b": _sizes(26, 1152, 4, 1, 6912, 256) | _1B,
    "gemma3_4b": _sizes(34, 2560, 8, 4, 10240, 256) | _LONG,
    "gemma3_12b": _sizes(48, 3840, 16, 8, 15360, 256) | _LONG,
    "gemma3_27b": _sizes(62, 5376, 32, 16, 21504, 128) | _LONG | {"query_width": 168},
}
GEMMA3 = ModelFamily(
    "gemma3", Gemma3Config, PRESETS, huggingface="jaxpipe.model.families.gemma3.huggingface"
)
