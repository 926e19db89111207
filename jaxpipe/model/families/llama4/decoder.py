"""A Llama 4 decoder: Llama's, with another attention.

Shapes: B examples, L tokens, H query heads, G key/value heads, K head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.llama.layers import LlamaAttention
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.rope.rotate import rotary


class Llama4Attention(LlamaAttention):
    """Grouped-query attention within chunks of a document, or to all of it without positions.

    Source: transformers' `Llama4TextAttention`.
    """

    config: Llama4Config

    def place(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, positions_BL: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rotate queries and keys and normalise them; without positions scale late queries."""
        config = self.config
        if config.has_positions:
            q_BLHK, k_BLGK = (rotary(x, positions_BL, config) for x in (q_BLHK, k_BLGK))
            if config.qk_l2_norm:
                q_BLHK, k_BLGK = (_normalise(x, config.norm_eps) for x in (q_BLHK, k_BLGK))
        elif config.temperature_scale:
            wide = jnp.promote_types(q_BLHK.dtype, jnp.float32)
            steps_BL = ((positions_BL + 1) // config.temperature_floor).astype(wide)
            factor_BL = 1 + config.temperature_scale * jnp.log1p(steps_BL)
            q_BLHK = (q_BLHK * factor_BL[..., None, None]).astype(q_BLHK.dtype)
        return q_BLHK, k_BLGK

    def limit(self, documents: RowDocuments | None, positions_BL: jax.Array) -> RowDocuments | None:
        """The documents cut into chunks.

        Plain products and blocks read positions alone, so a chunk needs no number of its own.
        """
        chunk = self.config.attention_chunk
        if not chunk or not self.config.has_positions:
            return documents
        segments = jnp.zeros_like(positions_BL) if documents is None else documents.segments
        return RowDocuments(segments, positions_BL % chunk)


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last dim."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)


@dataclass(frozen=True)
class Llama4Decoder(LlamaDecoder):
    """A Llama-style decoder whose layers have `Llama4Attention`."""

    config: Llama4Config
    attention = Llama4Attention
