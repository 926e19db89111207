"""A Llama-style decoder as pure functions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxpipe.core.contract import Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.layer import Pair
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.layers import LlamaAttention, LlamaEmbedHead, LlamaLayer
from jaxpipe.model.layers.moe.balance import REAL, ROUTES, Balance
from jaxpipe.model.layers.moe.config import is_sparse
from jaxpipe.model.layers.moe.experts import PRODUCTS, exchange_in_turn
from jaxpipe.model.layers.moe.layer import KEEP
from jaxpipe.model.layers.pairing import in_rounds
from jaxpipe.model.layers.parts import EmbedHeadParts, Init
from jaxpipe.model.options import LayerParts

Tree = Any


@dataclass(frozen=True)
class LlamaDecoder(CausalDecoder):
    """A Llama-style decoder, with experts or without; positions rotate queries and keys."""

    config: LlamaConfig
    attention: ClassVar[Callable[..., nnx.Module]] = LlamaAttention
    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without the router's."""
        own = "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"
        return (*own, *PRODUCTS) if self.config.n_experts else own

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        return self.layer_type(kind, self.config, parts, init, self.attention)

    def new_embed_head(self, parts: EmbedHeadParts, init: Init) -> nnx.Module:
        """Build embedding, final norm and head as a module."""
        return LlamaEmbedHead(self.config, parts, init)

    def embed(self, embed_head: Tree, rows: Tree) -> jax.Array:
        """Embed tokens: `[B, L]` to x `[B, L, D]`."""
        tokens = rows["inputs"]
        x = nnx.merge(self._embed_head_graph, embed_head).enter(tokens)
        return self._masks(rows, -1, tokens.shape[1]).stream(x, "embedding")

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        positions = self._positions(context.rows, x.shape[0], self._length(x))
        layer = nnx.merge(self._layers[kind], params)
        return layer(x, positions, context, self._given(x, context))

    def kept(self, kind: str) -> tuple[str, ...]:
        """The choice of experts, which rounding must not change between F and B."""
        return KEEP if is_sparse(kind) else ()

    def pair(self, kind: str) -> Pair | None:
        """Rounds that exchange rows with the experts during the paired layer's products."""
        in_turn = is_sparse(kind) and self.sharing.replicas.size > 1
        return in_rounds(exchange_in_turn) if in_turn else None

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it, with the variables and counts of its experts."""
        functions = super().functions
        if not self.config.n_experts:
            return functions
        balance = Balance(self.config, self.sharing)
        reads = (*functions.batch_keys, ROUTES, *(() if self.ops.documents else (REAL,)))
        functions = replace(functions, report=balance.report, batch_keys=reads)
        if balance.variables is None:
            return functions
        return functions.with_variables(balance.variables, balance.next_variables)
