"""Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, "DeepSeek-V3.2").

What the indexer reads is detached: its own loss alone trains it, and does not train the model.
DeepSeek's code multiplies the indexer's queries and keys by a Hadamard matrix before it rounds them
to 8 bits. That matrix is orthogonal and changes no score, so it is left out here, as it is in
transformers.

Shapes: those of `jaxpipe.model.families.deepseek.attention`; I heads of the indexer, E their width.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.core.contract import Aux, Context, LayerOutput
from jaxpipe.model.attention.causal import append_cache
from jaxpipe.model.attention.indexed import IndexedAttention, IndexQueries
from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.families.deepseek.attention import (
    LatentAttention,
    absorb,
    shared_by_heads,
    to_values,
)
from jaxpipe.model.families.deepseek.config import BLOCK, DeepseekConfig
from jaxpipe.model.families.llama.layers import LlamaLayer
from jaxpipe.model.layers.moe.balance import real_tokens
from jaxpipe.model.layers.moe.config import GROUPED
from jaxpipe.model.layers.parts import PLAIN_DOT, Init, LayerInputs, LayerNorm, within
from jaxpipe.model.layers.rope.rotate import rotary
from jaxpipe.model.options import LayerParts

LOSS, TOKENS = "indexer_loss", "indexer_tokens"  # names of sums in `Aux`
_EPS = 1e-6  # of the norm of the indexer's keys, in DeepSeek's code and in transformers


class Indexer(nnx.Module):
    """The queries, weights and keys of an index score; devices that share a layer have all of it.

    So these devices choose the same keys without asking each other, and their gradients are equal.
    """

    def __init__(self, config: DeepseekConfig, parts: LayerParts, init: Init):
        heads, width, whole = config.index_n_heads, config.index_head_dim, parts.own(differs=False)
        d = config.d_model
        self.wq = init("attn/indexer/wq", (config.q_lora_rank, heads * width), 0.02, whole)
        self.wk = init("attn/indexer/wk", (d, width), 0.02, whole)
        self.k_norm = LayerNorm("attn/indexer/k_norm", width, _EPS, init, whole)
        self.weights = init("attn/indexer/weights", (d, heads), 0.02, whole)
        self.config = config

    def __call__(
        self, x_BLD: jax.Array, query_BLR: jax.Array, positions_BL: jax.Array
    ) -> tuple[IndexQueries, jax.Array]:
        """Return queries and weights of the tokens, and their keys `[B, L, 1, E]`.

        Args:
          x_BLD: input of attention.
          query_BLR: the latent from which its queries are computed.
          positions_BL: the tokens' positions.
        """
        config, (x_BLD, query_BLR) = self.config, lax.stop_gradient((x_BLD, query_BLR))
        (q_BLX,), (k_BLE,) = (
            PLAIN_DOT(query_BLR, wq=self.wq[...]),
            PLAIN_DOT(x_BLD, wk=self.wk[...]),
        )
        q_BLIE = q_BLX.reshape(*q_BLX.shape[:2], -1, config.index_head_dim)
        k_BL1E = self.k_norm(k_BLE)[:, :, None]
        # The first dims rotate, in DeepSeek-V3.2 in other pairs than those of attention.
        q_BLIE, k_BL1E = (
            rotary(y, positions_BL, config, neighbours=config.index_rotates_neighbours)
            for y in (q_BLIE, k_BL1E)
        )
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        weight_BLI = x_BLD.astype(wide) @ self.weights[...].astype(wide)
        return IndexQueries(q_BLIE, weight_BLI * config.index_n_heads**-0.5), k_BL1E


class IndexedLatentAttention(LatentAttention):
    """Latent attention whose queries each attend to the keys that the indexer chooses.

    Every head reads the latents themselves (`absorb`), of which each query has its own few.
    """

    CHOOSES = True

    def __init__(self, config: DeepseekConfig, parts: LayerParts, init: Init):
        super().__init__(config, parts, init)
        if self.CHOOSES:
            self.indexer = Indexer(config, parts, init)
        nope = config.qk_nope_head_dim
        self.attend = IndexedAttention(
            0 if config.index_warmup else config.index_topk,
            shared_by_heads,
            partial(absorb, nope),
            partial(to_values, nope),
            self.CHOOSES and config.index_loss > 0,
            parts.sharing.sequence,
            parts.devices,
        )

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs,
        chosen_BLX: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, Cache | None]:  # fmt: skip
        """Mix tokens, `[B, L, D] -> [B, L, D]`.

        Returns the output, the indexer's losses `[B, L]`, the chosen keys, which without an indexer
        are the given ones, and with slices the cache.
        """
        x_BLD, index = self.devices.enter(x_BLD), None
        q_BLHK, parts, query_BLR = self.operands(x_BLD, positions_BL, given.dot)
        if self.CHOOSES:
            index, key_BL1E = self.indexer(x_BLD, query_BLR, positions_BL)
            parts = *parts, key_BL1E
        mixed_BLHV, *rest = self.attend(
            q_BLHK, index, parts, self.expansions(q_BLHK), given, chosen_BLX
        )
        return self.output(mixed_BLHV, given.dot), *rest


class SharedLatentAttention(IndexedLatentAttention):
    """The same to keys that an earlier layer has chosen."""

    CHOOSES = False


class IndexedLayer(LlamaLayer):
    """A layer with an indexer, whose loss is an auxiliary output.

    While the indexer warms up, nothing that other layers have depends on gradients: y has none.
    """

    def __init__(
        self, kind: str, config: DeepseekConfig, parts: LayerParts, init: Init,
        mixer: type[nnx.Module] = IndexedLatentAttention,
    ):  # fmt: skip
        super().__init__(kind, config, parts, init, mixer)
        self.config, self.has_loss = config, mixer.CHOOSES and config.index_loss > 0

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context, given: LayerInputs
    ) -> LayerOutput:
        """`[B, L, D] -> [B, L, D]`, and with slices what keys are made of up to the slice's end."""
        return self.with_choice(x_BLD, positions_BL, context, given)[0]

    def with_choice(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context, given: LayerInputs,
        chosen_BLX: jax.Array | None = None,
    ) -> tuple[LayerOutput, jax.Array | None]:  # fmt: skip
        """The same, and the chosen keys; without an indexer the given ones are used."""
        read_BLD, add = self.mixer_residual(x_BLD)
        mixed_BLD, loss_BL, chosen_BLX, cache = self.attn(
            self.attn_norm(read_BLD), positions_BL, given, chosen_BLX
        )
        y_BLD, aux = self.after_attention(add, mixed_BLD, context, given)
        if self.config.index_warmup:
            y_BLD = lax.stop_gradient(y_BLD)
        if self.has_loss:
            aux = self._with_loss(aux, loss_BL, real_tokens(context.rows))
        return append_cache(y_BLD, cache, aux), chosen_BLX

    def _with_loss(self, aux: Aux, loss_BL: jax.Array, real_BL: jax.Array | None) -> Aux:
        """The auxiliary output with the indexer's loss over the tokens that are not padding."""
        if real_BL is None:
            real_BL = jnp.ones(loss_BL.shape, bool)
        loss, tokens = jnp.where(real_BL, loss_BL, 0).sum(), real_BL.sum(dtype=jnp.int32)
        sums = {LOSS: lax.stop_gradient(loss), TOKENS: tokens}
        losses = {"indexer": (self.config.index_loss * loss, tokens)}
        return aux._replace(losses={**aux.losses, **losses}, sums={**aux.sums, **sums})


class IndexedGroup(nnx.Module):
    """Consecutive blocks, `block_0` and so on, that attend to the keys which the first chooses."""

    def __init__(self, kind: str, config: DeepseekConfig, parts: LayerParts, init: Init):
        for k, of_block in enumerate(kind.split(GROUPED)):
            mixer = SharedLatentAttention if k else IndexedLatentAttention
            name = f"{BLOCK}{k}"
            block = IndexedLayer(of_block, config, parts, within(init, name), mixer)
            setattr(self, name, block)
        self.count = k + 1

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context,
        given: Callable[[jax.Array, Context], LayerInputs],
    ) -> LayerOutput:  # fmt: skip
        """`[B, L, D] -> [B, L, D]`, with a state of every block; `given` is of a block's context.

        `context.index` is that of the first block.
        """
        chosen_BLX, states, aux = None, [], Aux()
        for k in range(self.count):
            state = None if context.state is None else context.state[k]
            own = context._replace(index=context.index + k, state=state)
            output, chosen_BLX = getattr(self, f"{BLOCK}{k}").with_choice(
                x_BLD, positions_BL, own, given(x_BLD, own), chosen_BLX
            )
            x_BLD, of_block = output.y, output.aux
            states.append(output.state)
            losses = {f"{name}_{k}": pair for name, pair in of_block.losses.items()}
            aux = Aux(
                {**aux.losses, **losses}, _added(aux.sums, of_block.sums),
                per_example=_added(aux.per_example, of_block.per_example),
            )  # fmt: skip
        return LayerOutput(x_BLD, None if context.state is None else tuple(states), aux)


def _added(before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {**before, **{k: before[k] + v if k in before else v for k, v in more.items()}}
