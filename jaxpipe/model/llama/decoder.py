"""A Llama-style decoder as pure functions."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpipe.contract import Context, LayerOutput
from jaxpipe.model.attention import Attend
from jaxpipe.model.decoder import CausalDecoder, with_past
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama.layers import DecoderLayer, Ends
from jaxpipe.model.parts import EndParts, Init, Parts

Tree = Any


@dataclass(frozen=True)
class Decoder(CausalDecoder):
    """Llama 3, Qwen3 or Mistral: positions turn queries and keys."""

    config: LlamaConfig

    @property
    def attend(self) -> Attend:
        """Causal attention, within the window if there is one, and the document."""
        config = self.config
        return Attend(self.sequence, config.attention, config.sliding_window, self.documents)

    def new_layer(self, parts: Parts, init: Init) -> nnx.Module:
        """A layer as a module."""
        return DecoderLayer(self.config, parts, init)

    def new_ends(self, parts: EndParts, init: Init) -> nnx.Module:
        """Embedding, final norm and head as a module."""
        return Ends(self.config, parts, init)

    def embed(self, ends: Tree, rows: Tree) -> jax.Array:
        """Tokens to `x [B, L, D]`."""
        tokens = rows["inputs"]
        x = nnx.merge(self._ends, ends).enter(tokens)
        return self._masks(rows, -1, tokens.shape[1]).stream(x, "embedding")

    def layer(self, params: Tree, x: jax.Array, context: Context) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; of slices the state has keys and values."""
        length = self._length(x)
        positions = self._positions(context.rows, x.shape[0], length)
        masks = self._masks(context.rows, context.index, length)
        layer = nnx.merge(self._layer, params)
        documents = self._documents(context.rows)
        return with_past(*layer(x, positions, self._past(x, context), masks, documents))
