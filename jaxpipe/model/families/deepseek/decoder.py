"""A DeepSeek decoder as pure functions."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.layer import EMBED_HEAD
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.ahead import ahead_keys
from jaxpipe.model.attention.indexed import CHOSEN
from jaxpipe.model.families.deepseek.config import PREDICTION, DeepseekConfig
from jaxpipe.model.families.deepseek.indexer import LOSS, TOKENS
from jaxpipe.model.families.deepseek.prediction import Predicted, Predictions, new_block
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.layers.moe.experts import PRODUCTS
from jaxpipe.model.layers.moe.layer import KEEP
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.loss import count_valid
from jaxpipe.model.options import LayerParts

Tree = Any


@dataclass(frozen=True)
class DeepseekDecoder(LlamaDecoder):
    """A Llama-style decoder with latent attention: DeepSeek-V2, V3 and V3.2, Kimi-K2.

    With `mtp_depth` the last layer predicts further tokens. It returns its input, which the head
    reads as without it, and its losses as an auxiliary output. A microbatch then has the rows of
    `jaxpipe.model.ahead`.
    """

    config: DeepseekConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without the router's."""
        queries = ("wq_a", "wq_b") if self.config.q_lora_rank else ("wq",)
        expands = () if self.config.index_topk else ("wkv_b",)  # absorbed queries have no product
        own = *queries, "wkv_a", *expands, "wo", "w_gate", "w_up", "w_down"
        return (*own, *PRODUCTS) if self.config.n_experts else own

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if kind == PREDICTION:
            return Predictions(self.config, parts, init)
        return new_block(kind, self.config, parts, init)

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

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        if kind != PREDICTION:
            return super().layer(params, x, context, kind)
        if not context.rows.keys() >= {*ahead_keys(self.config.mtp_depth)}:
            return LayerOutput(x, context.state)  # generation, which predicts one token
        layer = nnx.merge(self._layers[kind], params)
        embed_head = nnx.merge(self._sharded_over_tp._embed_head_graph, context.embed_head)
        predicted = Predicted(embed_head.final_norm(x))
        for k in range(self.config.mtp_depth):
            depth = getattr(layer, f"depth_{k}")
            predicted = self._predict(k, depth, embed_head, predicted, context)
        states = predicted.states if self.sharing.slices > 1 else None
        return LayerOutput(x, states, predicted.aux)

    def _predict(
        self, k: int, depth: nnx.Module, embed_head: nnx.Module, predicted: Predicted,
        context: Context,
    ) -> Predicted:  # fmt: skip
        """Predict the token k + 2 places ahead of a position's input."""
        config, decoder, x = self.config, self._sharded_over_tp, predicted.x_BLD
        inputs, targets = (context.rows[name] for name in ahead_keys(k + 1)[-2:])
        token_BLD = decoder.embed(context.embed_head, context.rows | {"inputs": inputs})
        positions_BL = self._positions(context.rows, x.shape[0], self._length(x))
        own = context._replace(index=jnp.int32(config.n_layers + k))
        if self.sharing.slices > 1:
            own = own._replace(state=context.state[k])
        output = depth(x, token_BLD, positions_BL, own, self._given(x, own))
        loss = decoder.cross_entropy(*embed_head.operands(output.y), targets, z_loss=0.0)
        return predicted.with_depth(output, loss, count_valid(targets), config)

    @cached_property
    def _sharded_over_tp(self) -> "DeepseekDecoder":
        """The decoder whose embedding and head are shared as layers read them: over tp alone."""
        return self.with_options(sharing={"embed_head_devices": None})

    def reads(self, kind: str) -> tuple[str, ...]:
        """Embedding and head, for predictions."""
        return (EMBED_HEAD,) if kind == PREDICTION else ()

    def kept(self, kind: str) -> tuple[str, ...]:
        """The choices of experts and keys, which rounding must not change between F and B."""
        has_experts = kind == PREDICTION and self.config.n_experts
        chosen = (CHOSEN,) if self.config.index_topk else ()
        return (KEEP if has_experts else super().kept(kind)) + chosen

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty keys and values before the first slice, of predictions for every depth."""
        state = super().state(x, rows, kind)
        return (state,) * self.config.mtp_depth if kind == PREDICTION else state

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
        """The model as pipeline stages see it; it logs mean losses of indexers and predictions."""
        functions, config = super().functions, self.config
        keys = (*functions.batch_keys, *ahead_keys(config.mtp_depth))
        if config.index_topk and not self.ops.documents:
            keys = tuple(dict.fromkeys((*keys, REAL)))

        def report(aux: Aux) -> dict[str, jax.Array]:
            means = {}
            if config.mtp_depth:
                loss, targets = aux.sums["mtp_loss"], aux.sums["mtp_targets"]
                means["mtp_loss"] = (loss / jnp.maximum(targets, 1)).mean()
            if config.index_topk and config.index_loss:
                means[LOSS] = aux.sums[LOSS] / jnp.maximum(aux.sums[TOKENS], 1)
            return {**functions.report(aux), **means}

        return replace(functions, report=report, batch_keys=keys)
