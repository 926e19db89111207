"""A decoder whose last layer may predict further tokens, as pure functions."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.layer import EMBED_HEAD
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.loss import count_valid
from jaxpipe.model.neighbours import ahead_keys
from jaxpipe.model.options import LayerParts
from jaxpipe.model.prediction.config import PREDICTION, PredictingConfig
from jaxpipe.model.prediction.layer import Predicted, Predictions

Tree = Any


class PredictingDecoder(LlamaDecoder):
    """A Llama-style decoder whose last layer predicts further tokens, with `mtp_depth`.

    This layer returns its input, which the head reads as without it, and its losses as an auxiliary
    output. A microbatch then has the rows of `jaxpipe.model.neighbours`.
    """

    config: PredictingConfig

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if kind != PREDICTION:
            return super().new_layer(kind, parts, init)
        new_block = partial(self.new_layer, self.config.block_kind, parts)
        return Predictions(self.config, parts, init, new_block)

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
    def _sharded_over_tp(self) -> "PredictingDecoder":
        """The decoder whose embedding and head are shared as layers read them: over tp alone."""
        return self.with_options(sharing={"embed_head_devices": None})

    def reads(self, kind: str) -> tuple[str, ...]:
        """Embedding and head, for predictions."""
        return (EMBED_HEAD,) if kind == PREDICTION else ()

    def kept(self, kind: str) -> tuple[str, ...]:
        """The choice of experts, which rounding must not change between F and B."""
        return super().kept(self.config.block_kind if kind == PREDICTION else kind)

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty keys and values before the first slice, of predictions for every depth."""
        state = super().state(x, rows, kind)
        return (state,) * self.config.mtp_depth if kind == PREDICTION else state

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it; it logs the mean loss of predictions."""
        functions, depth = super().functions, self.config.mtp_depth
        if not depth:
            return functions

        def report(aux: Aux) -> dict[str, jax.Array]:
            loss, targets = aux.sums["mtp_loss"], aux.sums["mtp_targets"]
            mean = (loss / jnp.maximum(targets, 1)).mean()
            return {**functions.report(aux), "mtp_loss": mean}

        keys = (*functions.batch_keys, *ahead_keys(depth))
        return replace(functions, report=report, batch_keys=keys)
