"""A GPT-2 as pure functions."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpipe.contract import Context, LayerOutput
from jaxpipe.model.attention import Attend, with_past
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.gpt2.config import GPT2Config
from jaxpipe.model.gpt2.layers import DecoderLayer, Ends
from jaxpipe.model.parts import EndParts, Init, Parts

Tree = Any


@dataclass(frozen=True)
class GPT2(CausalDecoder):
    """GPT-2, whose positions are embedded with the tokens."""

    config: GPT2Config

    @property
    def attend(self) -> Attend:
        """Causal attention, limited to the document."""
        return Attend(self.sequence, self.config.attention, documents=self.documents)

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights."""
        return "wq", "wk", "wv", "wo", "w_up", "w_down"

    def new_layer(self, kind: str, parts: Parts, init: Init) -> nnx.Module:
        """Build a layer as a module; there is one kind."""
        return DecoderLayer(self.config, parts, init)

    def new_ends(self, parts: EndParts, init: Init) -> nnx.Module:
        """Build embedding, positions, final norm and head as a module."""
        return Ends(self.config, parts, init)

    def embed(self, ends: Tree, rows: Tree) -> jax.Array:
        """Embed tokens: `[B, L]` to x `[B, L, D]`."""
        tokens = rows["inputs"]
        x = nnx.merge(self._ends, ends).enter(tokens, self._positions(rows, *tokens.shape))
        return self._masks(rows, -1, tokens.shape[1]).stream(x, "embedding")

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        return with_past(*nnx.merge(self._layers[kind], params)(x, self._given(x, context)))
