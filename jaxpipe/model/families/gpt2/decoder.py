"""A GPT-2 as pure functions."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpipe.core.contract import Context, LayerOutput
from jaxpipe.model.attention.causal import append_cache
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt2.layers import GPT2EmbedHead, GPT2Layer
from jaxpipe.model.layers.parts import EmbedHeadParts, Init
from jaxpipe.model.options import LayerParts

Tree = Any


@dataclass(frozen=True)
class GPT2(CausalDecoder):
    """GPT-2, whose positions are embedded with the tokens."""

    config: GPT2Config

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights."""
        return "wq", "wk", "wv", "wo", "w_up", "w_down"

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer as a module; there is one kind."""
        return GPT2Layer(self.config, parts, init)

    def new_embed_head(self, parts: EmbedHeadParts, init: Init) -> nnx.Module:
        """Build embedding, positions, final norm and head as a module."""
        return GPT2EmbedHead(self.config, parts, init)

    def embed(self, embed_head: Tree, rows: Tree) -> jax.Array:
        """Embed tokens: `[B, L]` to x `[B, L, D]`."""
        tokens = rows["inputs"]
        x = nnx.merge(self._embed_head_graph, embed_head).enter(
            tokens, self._positions(rows, *tokens.shape)
        )
        return self._masks(rows, -1, tokens.shape[1]).stream(x, "embedding")

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        return append_cache(*nnx.merge(self._layers[kind], params)(x, self._given(x, context)))
