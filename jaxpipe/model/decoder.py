"""A decoder as pure functions of plain parameter trees; it does not know that it is pipelined."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.config import ModelConfig
from jaxpipe.model.layers import DecoderLayer, Ends, init_from
from jaxpipe.model.loss import count_valid, cross_entropy_sum

Tree = Any


@dataclass(frozen=True)
class Decoder:
    """The functions of one model.

    A microbatch is a dict of `inputs [B, L]`, `targets [B, L]` (-100: ignored) and optionally
    `positions [B, L]` (default: 0, 1, ... along each example).
    """

    config: ModelConfig

    def init_ends(self, key: jax.Array) -> Tree:
        """Embedding, final norm and head, as a nested dict of float32 arrays."""
        return nnx.to_pure_dict(nnx.state(Ends(self.config, init_from(key)), nnx.Param))

    def init_layer(self, key: jax.Array, index: jax.Array | int) -> Tree:
        """Parameters of layer `index`: a function of key, index and parameter names alone."""
        own = init_from(jax.random.fold_in(key, index))
        return nnx.to_pure_dict(nnx.state(DecoderLayer(self.config, own), nnx.Param))

    def embed(self, ends: Tree, microbatch: Tree) -> jax.Array:
        """Tokens to `x [B, L, D]`."""
        return nnx.merge(self._ends, ends).enter(microbatch["inputs"])

    def layer(self, params: Tree, x: jax.Array, microbatch: Tree) -> jax.Array:
        """One layer, `[B, L, D] -> [B, L, D]`."""
        positions = microbatch.get("positions")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return nnx.merge(self._layer, params)(x, positions)

    def head(self, ends: Tree, x: jax.Array, microbatch: Tree) -> jax.Array:
        """Summed cross-entropy of the microbatch, in nats."""
        return cross_entropy_sum(nnx.merge(self._ends, ends).leave(x), microbatch["targets"])

    def count(self, microbatch: Tree) -> jax.Array:
        """Number of tokens that the loss counts."""
        return count_valid(microbatch["targets"])

    @cached_property
    def _ends(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: Ends(self.config, init_from(jax.random.key(0)))))

    @cached_property
    def _layer(self) -> nnx.GraphDef:
        return nnx.graphdef(
            nnx.eval_shape(lambda: DecoderLayer(self.config, init_from(jax.random.key(0))))
        )
