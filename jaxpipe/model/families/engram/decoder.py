"""A Llama-style decoder in which some layers look up embeddings of n-grams.

Source: DeepSeek-AI 2026, "Conditional Memory via Scalable Lookup" (Engram), sections 2.2 and 2.3.

Shapes: B examples, L tokens, D model, T tables, of which a device has its shard, R rows of a table,
W their width, N tokens that an n-gram may have.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.core.contract import Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.layer import Tree
from jaxpipe.model.families.engram.config import NGRAM, ORDERS, EngramConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.llama.layers import LlamaLayer
from jaxpipe.model.layers.parts import Dot, Init, LayerInputs, RMSNorm
from jaxpipe.model.neighbours import before_keys
from jaxpipe.model.options import LayerParts


def hash_factors(heads: int) -> np.ndarray:
    """Odd numbers by which each table's hash multiplies tokens, `[T, N]` uint32; 0: not read.

    Tables of the shortest n-grams come first; column j is of the token j places back.
    """
    random = np.random.default_rng(0).integers(0, 2**31, (heads, len(ORDERS), max(ORDERS)))
    is_read = np.arange(max(ORDERS)) < np.asarray(ORDERS)[:, None]
    factors = np.where(is_read, 2 * random + 1, 0).swapaxes(0, 1)
    return factors.reshape(-1, max(ORDERS)).astype(np.uint32)


def hash_ngrams(tokens_NBL: jax.Array, factors_TN: jax.Array, rows: int) -> jax.Array:
    """Rows of the tables in which n-grams are, `[B, L, T]`.

    Args:
      tokens_NBL: each position's token, the one before it, and so on; -1: there is none.
      factors_TN: `hash_factors`, or some of them.
      rows: number of rows of a table.
    """
    tokens_NBL1 = (tokens_NBL + 1).astype(jnp.uint32)[..., None]
    mixed_BLT = jnp.zeros((), jnp.uint32)
    for token_BL1, factor_T in zip(tokens_NBL1, factors_TN.T):
        mixed_BLT = mixed_BLT ^ (token_BL1 * factor_T[None, None])
    # The low bits of a product depend on the low bits of its factors alone.
    for shift, factor in (16, 0x7FEB352D), (15, 0x846CA68B):
        mixed_BLT = (mixed_BLT ^ (mixed_BLT >> shift)) * jnp.uint32(factor)
    return ((mixed_BLT ^ (mixed_BLT >> 16)) % jnp.uint32(rows)).astype(jnp.int32)


class NGramMemory(nnx.Module):
    """Embeddings of the n-grams that end at a token, weighted by how well they fit the stream.

    Devices that share a layer have complete tables; each looks up its own.
    """

    def __init__(self, config: EngramConfig, parts: LayerParts, init: Init):
        tables, width, d = config.ngram_tables, config.ngram_width, config.d_model
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        # Optimizers and adapters treat it as vectors: an update reads few of its rows.
        self.tables = init("ngram/tables", (tables, config.ngram_rows, width), _draw, parts.cut(0))
        self.to_key = init("ngram/to_key", (tables * width, d), 0.02, parts.cut(0))
        self.to_value = init("ngram/to_value", (tables * width, d), out_std, parts.cut(0))
        own = parts.own(differs=parts.devices.sequence)
        self.key_norm = RMSNorm("ngram/key_norm", d, config.norm_eps, init, own)
        self.query_norm = RMSNorm("ngram/query_norm", d, config.norm_eps, init, own)
        self.config, self.devices = config, parts.devices

    def __call__(self, x_BLD: jax.Array, rows: Tree, dot: Dot) -> jax.Array:
        """What a layer adds to its input, `[B, L, D] -> [B, L, D]`."""
        names = "inputs", *before_keys(self.config.tokens_before)
        own = self.config.ngram_tables // self.devices.size
        factors_TN = jax.lax.dynamic_slice_in_dim(
            jnp.asarray(hash_factors(self.config.ngram_heads)), self.devices.index() * own, own
        )
        tokens_NBL = jnp.stack([rows[name] for name in names])
        index_BLT = hash_ngrams(tokens_NBL, factors_TN, self.config.ngram_rows)
        found_BLTW = self.tables[...][jnp.arange(own), index_BLT]
        found_BLX = found_BLTW.reshape(*found_BLTW.shape[:2], -1).astype(x_BLD.dtype)
        products = dot(found_BLX, to_key=self.to_key[...], to_value=self.to_value[...])
        both_BLX = self.devices.leave(jnp.concatenate(products, axis=-1))
        key_BLD, value_BLD = jnp.split(both_BLX, 2, axis=-1)
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        query_BLD, key_BLD = self.query_norm(x_BLD), self.key_norm(key_BLD)
        score_BL1 = (query_BLD.astype(wide) * key_BLD).sum(-1, keepdims=True)
        gate_BL1 = jax.nn.sigmoid(score_BL1 / x_BLD.shape[-1] ** 0.5)
        return gate_BL1.astype(x_BLD.dtype) * value_BLD


def _draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, jnp.float32)


class EngramLayer(LlamaLayer):
    """A layer of a Llama whose input gets the embeddings of n-grams added."""

    def __init__(self, kind: str, config: EngramConfig, parts: LayerParts, init: Init):
        super().__init__(kind, config, parts, init)
        self.ngram = NGramMemory(config, parts, init)

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context, given: LayerInputs
    ) -> LayerOutput:
        """`[B, L, D] -> [B, L, D]`, and with slices the state of the mixer after the slice."""
        x_BLD = x_BLD + self.ngram(x_BLD, context.rows, given.dot)
        return super().__call__(x_BLD, positions_BL, context, given)


@dataclass(frozen=True)
class EngramDecoder(LlamaDecoder):
    """A Llama-style decoder whose `ngram_` layers look up n-grams.

    A microbatch has the rows of `jaxpipe.model.neighbours.rows_before`.
    """

    config: EngramConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without the router's."""
        return (*super().products, "to_key", "to_value")

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if kind.startswith(NGRAM):
            return EngramLayer(kind, self.config, parts, init)
        return super().new_layer(kind, parts, init)

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it."""
        functions = super().functions
        before = before_keys(self.config.tokens_before)
        return replace(functions, batch_keys=(*functions.batch_keys, *before))
