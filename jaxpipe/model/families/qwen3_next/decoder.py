"""A Llama-style decoder in which some layers have a gated delta network instead of attention."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.llama.layers import LlamaAttention, LlamaLayer
from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig, is_linear
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.gated_delta import GatedDeltaNetwork, empty_state
from jaxpipe.model.recurrent.heads import shares_of_heads

Tree = Any


class HybridStates(LlamaDecoder):
    """The states of a decoder whose `linear_` layers have a `GatedDeltaNetwork`."""

    def is_recurrent(self, kind: str) -> bool:
        """Whether the state of layers of a kind is that of a gated delta network."""
        return is_linear(kind)

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty state before the first slice of a sequence: keys and values, or a recurrence's."""
        if not is_linear(kind):
            return super().state(x, rows, kind)
        sharing = self.sharing
        return empty_state(self.config, x, shares_of_heads(sharing.devices, sharing.sequence))


@dataclass(frozen=True)
class HybridDecoder(HybridStates):
    """A Llama-style decoder whose `linear_` layers have a `GatedDeltaNetwork`."""

    config: Qwen3NextConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without those of routers, rates and decays."""
        return (*super().products, "wg", "wz")

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        mixer = GatedDeltaNetwork if is_linear(kind) else LlamaAttention
        return LlamaLayer(kind, self.config, parts, init, mixer)
