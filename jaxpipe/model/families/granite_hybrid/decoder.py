"""A decoder with Mamba-2 in most layers, and Granite's factors."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from flax import nnx

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.families.granite_hybrid.config import GraniteHybridConfig
from jaxpipe.model.families.llama.layers import LlamaEmbedHead, LlamaLayer
from jaxpipe.model.layers.hyper_connection import Add, Residual
from jaxpipe.model.layers.parts import EmbedHeadParts, Init, scale
from jaxpipe.model.recurrent.decoder import MambaDecoder


class GraniteLayer(LlamaLayer):
    """A layer whose sublayers add to the stream what they return times a factor."""

    def new_residual(
        self, name: str, config: GraniteHybridConfig, init: Init, leaf: ParamSpec
    ) -> Residual:
        """Build the connection by which a sublayer reads the stream and adds to it."""
        factor = config.residual_multiplier

        def residual(x_BLD: jax.Array) -> tuple[jax.Array, Add]:
            return x_BLD, lambda y_BLD: x_BLD + scale(y_BLD, factor)

        return residual


class GraniteEmbedHead(LlamaEmbedHead):
    """Embedding and head with a factor each."""

    def __init__(self, config: GraniteHybridConfig, parts: EmbedHeadParts, init: Init):
        super().__init__(config, parts, init)
        self.scale, self.divisor = config.embedding_multiplier, config.logits_scaling

    def operands(self, normed_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the head's operands for a stream that is normalised already."""
        x_BLD, head_DV = super().operands(normed_BLD)
        return scale(x_BLD, 1 / self.divisor), head_DV


@dataclass(frozen=True)
class GraniteHybridDecoder(MambaDecoder):
    """A decoder of `GraniteLayer`s, most of which have a `Mamba2`."""

    config: GraniteHybridConfig
    layer_type: ClassVar[type[LlamaLayer]] = GraniteLayer

    def new_embed_head(self, parts: EmbedHeadParts, init: Init) -> nnx.Module:
        """Build embedding, final norm and head as a module."""
        return GraniteEmbedHead(self.config, parts, init)
