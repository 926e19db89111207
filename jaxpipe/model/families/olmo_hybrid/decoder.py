"""A decoder most of whose layers have OLMo's gated delta network."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from msgspec.structs import replace

from jaxpipe.model.families.olmo_hybrid.config import OlmoHybridConfig
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.decoder import DeltaDecoder, Recurrence
from jaxpipe.model.recurrent.gated_delta import GatedDeltaNetwork


class OlmoDelta(GatedDeltaNetwork):
    """A gated delta network whose corrections have rates up to 2, by which a state may change sign.

    Source: transformers' `OlmoHybridGatedDeltaNet`.
    """

    def __init__(self, config: OlmoHybridConfig, parts: LayerParts, init: Init):
        super().__init__(replace(config, norm_eps=1e-5), parts, init)  # whatever other norms have

    def gates(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rate of each token's correction, and the logarithm of the decay before it."""
        rate_BLH, decay_BLH = super().gates(x_BLD)
        return 2 * rate_BLH, decay_BLH


@dataclass(frozen=True)
class OlmoHybridDecoder(DeltaDecoder):
    """A decoder whose `linear_` layers have an `OlmoDelta`, and the others OLMo 2's attention."""

    config: OlmoHybridConfig
    recurrence: ClassVar[Recurrence] = OlmoDelta
