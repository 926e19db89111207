"""A DeepSeek-V4 decoder: Llama's, with hyper-connections, and attention to entries.

Shapes: B examples, L tokens, D model, N copies of the stream, V vocabulary, E experts that a token
chooses.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.core.contract import Aux, Context, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.families.deepseek_v4.attention import MIXERS, empty_state
from jaxpipe.model.families.deepseek_v4.compression import CHOSEN
from jaxpipe.model.families.deepseek_v4.config import HASHED, DeepseekV4Config, attention_of_kind
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.llama.layers import LlamaEmbedHead, LlamaLayer
from jaxpipe.model.layers.hyper_connection import HyperConnection, HyperHead, Residual
from jaxpipe.model.layers.moe.experts import PRODUCTS
from jaxpipe.model.layers.moe.layer import MixtureOfExperts
from jaxpipe.model.layers.parts import EmbedHeadParts, Init
from jaxpipe.model.options import LayerParts

Tree = Any
TABLE = "token_experts"  # variable of the experts that the table gives to tokens


class HashedExperts(MixtureOfExperts):
    """Experts that are chosen by a fixed table of tokens, and weighted by their scores."""

    def _given(self, x_BLD: jax.Array, context: Context) -> jax.Array:
        """The recorded choice, or that of the table, `[B, L, E]`."""
        recorded_BLE = super()._given(x_BLD, context)
        if recorded_BLE is not None:
            return recorded_BLE
        layers = self.balance.config.variable_layers(TABLE)
        place = jnp.argmax(jnp.asarray(layers) == context.index)
        chosen_BLE = context.variables[TABLE][place, context.rows["inputs"]]
        return self.token_devices.own_tokens(chosen_BLE)


class DeepseekV4Layer(LlamaLayer):
    """Attention to entries and experts, each of which reads and adds to N copies of the stream."""

    def new_residual(
        self, name: str, config: DeepseekV4Config, init: Init, leaf: ParamSpec
    ) -> Residual:
        """Build the hyper-connection of a sublayer."""
        return HyperConnection(name, config, init, leaf)


class DeepseekV4EmbedHead(LlamaEmbedHead):
    """Embedding, the weighted sum of the copies of the stream, final norm and head."""

    def __init__(self, config: DeepseekV4Config, parts: EmbedHeadParts, init: Init):
        super().__init__(config, parts, init)
        self.collapse = HyperHead(config, init, parts.own())

    def leave(self, x_BLND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the head's operands: `[B, L, D]` of all tokens, and its matrix `[D, V]`."""
        return super().leave(self.collapse(x_BLND))


@dataclass(frozen=True)
class DeepseekV4Decoder(LlamaDecoder):
    """A decoder whose stream has N copies of every token: x is `[B, L, N, D]`."""

    config: DeepseekV4Config

    @property
    def products(self) -> tuple[str, ...]:
        """Names of the weights that a layer's `dot` multiplies with."""
        return "wq_a", "wq_b", "wkv", "wo_b", "w_gate", "w_up", "w_down", *PRODUCTS

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        mixer = MIXERS[attention_of_kind(kind)]
        experts = HashedExperts if HASHED in kind else MixtureOfExperts
        return DeepseekV4Layer(kind, self.config, parts, init, mixer, experts)

    def new_embed_head(self, parts: EmbedHeadParts, init: Init) -> nnx.Module:
        """Build embedding, final sum and norm, and head as a module."""
        return DeepseekV4EmbedHead(self.config, parts, init)

    def embed(self, embed_head: Tree, rows: Tree) -> jax.Array:
        """Embed tokens: `[B, L]` to N equal copies, `[B, L, N, D]`."""
        x_BLD = super().embed(embed_head, rows)
        batch, length, width = x_BLD.shape
        return jnp.broadcast_to(x_BLD[:, :, None], (batch, length, self.config.hc_mult, width))

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty buffers before the first slice: last tokens of each slice, and all entries."""
        return empty_state(
            self.config, attention_of_kind(kind), x, self._length(x), self.sharing,
            documents=bool(self.ops.documents),
        )  # fmt: skip

    def kept(self, kind: str) -> tuple[str, ...]:
        """The choices of experts and of entries, which rounding must not change between F and B."""
        return (*super().kept(kind), CHOSEN)

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it, with the table of the experts of tokens."""
        functions, layers = super().functions, len(self.config.hashed_layers)
        if not layers:
            return functions
        return functions.with_variables({TABLE: initial_table(self.config, layers)}, _unchanged)


def initial_table(config: DeepseekV4Config, layers: int) -> np.ndarray:
    """Different experts for every token, `[layers, V, E]` int32, equally many tokens for each.

    A random order of the tokens, another in every layer, deals them out in turn.
    """
    each, experts = config.experts_per_token, config.n_experts
    orders = [
        np.random.default_rng(layer).permutation(config.vocab_size) for layer in range(layers)
    ]
    first = np.stack(orders)[..., None] * each
    return ((first + np.arange(each)) % experts).astype(np.int32)


def _unchanged(variables: Tree, aux: Aux) -> Tree:
    return {TABLE: variables[TABLE]}
