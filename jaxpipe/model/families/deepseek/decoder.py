"""A DeepSeek decoder as pure functions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.layer import Pair
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.attention.indexed import CHOSEN
from jaxpipe.model.families.deepseek.attention import LatentAttention
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek.indexer import LOSS, TOKENS, IndexedGroup, IndexedLayer
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.layers.moe.config import GROUPED
from jaxpipe.model.layers.moe.experts import PRODUCTS
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.options import LayerParts
from jaxpipe.model.prediction.config import PREDICTION
from jaxpipe.model.prediction.decoder import PredictingDecoder

Tree = Any


@dataclass(frozen=True)
class DeepseekDecoder(PredictingDecoder):
    """A Llama-style decoder with latent attention: DeepSeek-V2, V3 and V3.2, Kimi-K2, GLM-5."""

    config: DeepseekConfig
    attention: ClassVar[Callable[..., nnx.Module]] = LatentAttention

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without the router's."""
        queries = ("wq_a", "wq_b") if self.config.q_lora_rank else ("wq",)
        expands = () if self.config.index_topk else ("wkv_b",)  # absorbed queries have no product
        own = *queries, "wkv_a", *expands, "wo", "w_gate", "w_up", "w_down"
        return (*own, *PRODUCTS) if self.config.n_experts else own

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if not self.config.index_topk or kind == PREDICTION:
            return super().new_layer(kind, parts, init)
        layer = IndexedGroup if GROUPED in kind else IndexedLayer
        return layer(kind, self.config, parts, init)

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        if self.config.index_group > 1 and kind != PREDICTION:
            first = jnp.asarray(self.config.first_blocks)[context.index]
            context = context._replace(index=first)
        if GROUPED not in kind:
            return super().layer(params, x, context, kind)
        positions = self._positions(context.rows, x.shape[0], self._length(x))
        return nnx.merge(self._layers[kind], params)(x, positions, context, self._given)

    def pair(self, kind: str) -> Pair | None:
        """As of one block with experts; blocks of a group have no rounds together."""
        return None if GROUPED in kind else super().pair(kind)

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty keys and values before the first slice; of a group for every block."""
        state = super().state(x, rows, kind)
        if GROUPED not in kind:
            return state
        return (state, *(state[:-1],) * kind.count(GROUPED))

    @cached_property
    def leaves(self) -> dict[str, Tree]:
        """The `ParamSpec` of every parameter.

        An indexer without a loss is frozen, and while one warms up, so is everything else.
        """
        leaves, config = super().leaves, self.config
        if not config.index_topk or (config.index_loss and not config.index_warmup):
            return leaves

        def frozen(path: tuple[Any, ...], spec: ParamSpec) -> ParamSpec:
            is_of_indexer = any(key.key == "indexer" for key in path)
            return replace(spec, trained=is_of_indexer == (config.index_loss > 0))

        return jax.tree_util.tree_map_with_path(frozen, leaves)

    def kept(self, kind: str) -> tuple[str, ...]:
        """The choices of experts and keys, which rounding must not change between F and B."""
        return super().kept(kind) + ((CHOSEN,) if self.config.index_topk else ())

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """One latent and one rotated key of a token; all heads only where heads are exchanged.

        With an indexer its key, too.
        """
        if self.sharing.sequence.exchanges_heads:
            return super().cached
        sizes = (1, self.config.kv_lora_rank), (1, self.config.qk_rope_head_dim)
        return (*sizes, (1, self.config.index_head_dim)) if self.config.index_topk else sizes

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it; it logs the mean loss of indexers."""
        functions, config = super().functions, self.config
        if not config.index_topk:
            return functions
        real = () if self.ops.documents else (REAL,)
        keys = tuple(dict.fromkeys((*functions.batch_keys, *real)))

        def report(aux: Aux) -> dict[str, jax.Array]:
            if not config.index_loss:
                return functions.report(aux)
            mean = aux.sums[LOSS] / jnp.maximum(aux.sums[TOKENS], 1)
            return {**functions.report(aux), LOSS: mean}

        return replace(functions, report=report, batch_keys=keys)
