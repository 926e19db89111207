"""Sizes and choices of a Granite 4.0 H, and the published models."""

from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.layers.moe.config import NotNegative
from jaxpipe.model.recurrent.mamba_config import MambaConfig


class GraniteHybridConfig(MambaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Granite 4.0 H, by preset or by size; most layers have Mamba-2.

    Attention has no positions. Every layer has an MLP, or experts.
    """

    family: str = "granite_hybrid"
    tie_embeddings: bool = True
    embedding_multiplier: PositiveFloat = 1.0  # factor on embeddings
    # factor on attention's scores; 0: 1 / sqrt(head_dim)
    attention_multiplier: NotNegative = 0.0
    residual_multiplier: PositiveFloat = 1.0  # factor on what a sublayer adds to the stream
    logits_scaling: PositiveFloat = 1.0  # logits are divided by it

    UNREAD: ClassVar[tuple[str, ...]] = (*MambaConfig.UNREAD, "rope_", "rotary_share")

    @property
    def has_positions(self) -> bool:
        """Whether attention rotates queries and keys."""
        return False

    def resolved(self) -> Self:
        """The same model with every derived size, and the factor on scores, filled in."""
        factor = self.attention_multiplier or self.head_size**-0.5
        return replace(super().resolved(), attention_multiplier=factor)

    @property
    def query_factor(self) -> float:
        """Factor on queries, besides the 1 / sqrt(head_dim) on scores."""
        return self.attention_multiplier * self.head_size**0.5 or 1.0


# From the published config.json of granite-4.0-h-350m.
_SHARED = {"vocab_size": 100352, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625}
_350M = decoder_sizes(32, 768, 12, 4, 2048) | _SHARED | {
    "layer_pattern": "MMMMMMMMMM*MM*MMM*MMMMMMMMM*MMMM", "mamba_heads": 48, "mamba_head_dim": 32,
    "residual_multiplier": 0.246, "logits_scaling": 3.0, "max_seq_len": 32768,
}  # fmt: skip

PRESETS: dict[str, Preset] = {"granite_4_h_350m": _350M}
GRANITE_HYBRID = ModelFamily(
    "granite_hybrid",
    GraniteHybridConfig,
    PRESETS,
    model="jaxpipe.model.families.granite_hybrid.decoder:GraniteHybridDecoder",
    huggingface="jaxpipe.model.families.granite_hybrid.huggingface",
)
