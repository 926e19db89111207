"""A Llama-style decoder in which some layers have a recurrence instead of attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.config import HybridConfig, is_linear
from jaxpipe.model.recurrent.gated_delta import GatedDeltaNetwork
from jaxpipe.model.recurrent.heads import shares_of_heads
from jaxpipe.model.recurrent.mamba2 import Mamba2

Tree = Any
Recurrence = type[GatedDeltaNetwork] | type[Mamba2]


@dataclass(frozen=True)
class DeltaDecoder(LlamaDecoder):
    """A Llama-style decoder whose `linear_` layers have a `GatedDeltaNetwork`.

    A subclass may have another `recurrence` in its place.
    """

    config: HybridConfig
    recurrence: ClassVar[Recurrence] = GatedDeltaNetwork

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without those of routers, rates, steps and decays."""
        gate = ("wg",) if self.config.VARIANT.has_output_gate else ()
        return tuple(dict.fromkeys((*super().products, *gate, *self.recurrence.PRODUCTS)))

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if self.is_recurrent(kind):
            return self.layer_type(kind, self.config, parts, init, self.recurrence)
        return super().new_layer(kind, parts, init)

    def is_recurrent(self, kind: str) -> bool:
        """Whether the state of layers of a kind is that of a recurrence."""
        return is_linear(kind)

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty state before the first slice of a sequence: keys and values, or a recurrence's."""
        if not self.is_recurrent(kind):
            return super().state(x, rows, kind)
        shares = shares_of_heads(self.sharing.devices, self.sharing.sequence)
        return self.recurrence.empty_state(self.config, x, shares)


@dataclass(frozen=True)
class MambaDecoder(DeltaDecoder):
    """A Llama-style decoder whose `linear_` layers have a `Mamba2`."""

    recurrence: ClassVar[Recurrence] = Mamba2
