"""A decoder whose layers have one mixer of tokens, one MLP, or one mixture of experts each."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput
from jaxpipe.model.attention.causal import append_cache
from jaxpipe.model.families.llama.layers import LlamaAttention, LlamaMLP, new_norm
from jaxpipe.model.families.nemotron_h.config import ATTENTION, MAMBA, NemotronHConfig
from jaxpipe.model.layers.moe.config import is_sparse
from jaxpipe.model.layers.moe.layer import MixtureOfExperts
from jaxpipe.model.layers.parts import Init, LayerInputs
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.decoder import MambaDecoder
from jaxpipe.model.recurrent.mamba2 import Mamba2

Tree = Any
_MIXERS = {MAMBA: Mamba2, ATTENTION: LlamaAttention}


class NemotronHLayer(nnx.Module):
    """x + f(norm(x)), where f is Mamba-2, attention, an MLP or experts."""

    def __init__(self, kind: str, config: NemotronHConfig, parts: LayerParts, init: Init):
        leaf = parts.own(differs=parts.devices.sequence)
        self.norm = new_norm("norm", config.d_model, config, init, leaf)
        self.kind = kind
        if mixer := _MIXERS.get(kind):
            setattr(self, mixer.NAME, mixer(config, parts, init))
        elif is_sparse(kind):
            width = config.shared_experts * config.expert_width
            shared = LlamaMLP("shared", width, config, parts, init) if width else None
            self.moe = MixtureOfExperts(config, parts, init, shared)
        else:
            self.mlp = LlamaMLP("mlp", config.d_ff, config, parts, init)

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context, given: LayerInputs
    ) -> LayerOutput:
        """`[B, L, D] -> [B, L, D]`, and with slices the state of the mixer after the slice."""
        normed_BLD, aux, cache, sublayer = self.norm(x_BLD), Aux(), given.cache, "mlp"
        if mixer := _MIXERS.get(self.kind):
            sublayer = "attention"
            made_BLD, cache = getattr(self, mixer.NAME)(normed_BLD, positions_BL, given)
        elif is_sparse(self.kind):
            made_BLD, aux = self.moe(normed_BLD, context, given.dot)
        else:
            made_BLD = self.mlp(normed_BLD, given.dot)
        return append_cache(x_BLD + given.masks.stream(made_BLD, sublayer), cache, aux)


@dataclass(frozen=True)
class NemotronHDecoder(MambaDecoder):
    """A decoder of `NemotronHLayer`s between Llama's embedding and head."""

    config: NemotronHConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without those of routers and steps."""
        own = "wq", "wk", "wv", *Mamba2.PRODUCTS, "w_up", "w_down"
        return (*own, "expert_up", "expert_down") if self.config.n_experts else own

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        return NemotronHLayer(kind, self.config, parts, init)

    def is_recurrent(self, kind: str) -> bool:
        """Whether the state of layers of a kind is that of Mamba-2."""
        return kind == MAMBA

    def state(self, x: jax.Array, rows: Tree, kind: str = MAMBA) -> Tree:
        """Empty state before the first slice: keys and values, that of Mamba-2, or nothing."""
        return super().state(x, rows, kind) if kind in _MIXERS else ()
