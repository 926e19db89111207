"""Sizes and choices of an OLMo Hybrid, and the published model."""

from typing import ClassVar, Self

from msgspec.structs import asdict

from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.families.olmo2 import Olmo2Config
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.recurrent.config import is_linear
from jaxpipe.model.recurrent.delta_config import DeltaConfig
from jaxpipe.model.variant import Variant


class OlmoHybridConfig(DeltaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: an OLMo Hybrid, by preset or by size; most layers have a gated delta network.

    What gated delta networks and their MLPs read has a norm. In layers with attention, which has no
    positions, what attention and MLP return has one instead.
    """

    family: str = "olmo_hybrid"
    norm_eps: PositiveFloat = 1e-6
    qk_norm: bool = True

    VARIANT: ClassVar[Variant] = Variant(norms_span_heads=True)
    UNREAD: ClassVar[tuple[str, ...]] = (*DeltaConfig.UNREAD, "rope_", "rotary_share")

    @property
    def has_positions(self) -> bool:
        """Whether attention rotates queries and keys."""
        return False

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: with the norms that they have."""
        return self if is_linear(kind) else _OlmoAttention(**asdict(self))


class _OlmoAttention(OlmoHybridConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes of layers with attention."""

    VARIANT: ClassVar[Variant] = Olmo2Config.VARIANT


OLMO_HYBRID = ModelFamily(
    "olmo_hybrid",
    OlmoHybridConfig,
    {
        "olmo_hybrid_7b": decoder_sizes(32, 3840, 30, 30, 11008)
        | {"vocab_size": 100352, "max_seq_len": 65536, "delta_key_heads": 30}
        | {"delta_value_heads": 30, "delta_key_dim": 96, "delta_value_dim": 192}
    },
    model="jaxpipe.model.families.olmo_hybrid.decoder:OlmoHybridDecoder",
    huggingface="jaxpipe.model.families.olmo_hybrid.huggingface",
)
