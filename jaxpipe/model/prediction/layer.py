"""Multi-token prediction: a layer that trains the stream to predict further tokens.

Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2. Depth k = 1, 2, ... computes

    h_k = norm(Block_k(W_k [norm(Emb(t_{i+k})), norm(h_{k-1})])),

where h_0 is what the head reads, the stream after the final norm, and the loss of the model's own
head on h_k with the target t_{i+k+1}. Embedding and head are those of the model. The report does
not say where norms are; these are those of DeepSeek's and GLM's published weights, as transformers
and inference servers read them.

Shapes: B examples, L tokens, D model.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput
from jaxpipe.model.families.llama.layers import new_norm
from jaxpipe.model.layers.parts import Dot, Init, LayerInputs, within
from jaxpipe.model.options import LayerParts
from jaxpipe.model.prediction.config import PredictingConfig

# Builds a block of attention and MLP, or experts, of initial values.
NewBlock = Callable[[Init], nnx.Module]


class Prediction(nnx.Module):
    """One depth: it merges the stream with the embedding of a token ahead, and has a block."""

    def __init__(
        self, config: PredictingConfig, parts: LayerParts, init: Init, new_block: NewBlock
    ):
        d, own = config.d_model, parts.own(differs=parts.devices.sequence)
        self.token_norm = new_norm("token_norm", d, config, init, own)
        self.stream_norm = new_norm("stream_norm", d, config, init, own)
        self.merge = init("merge", (2 * d, d), 0.02, own)
        self.block = new_block(init)
        self.norm = new_norm("norm", d, config, init, own)

    def __call__(
        self, x_BLD: jax.Array, token_BLD: jax.Array, positions_BL: jax.Array, context: Context,
        given: LayerInputs,
    ) -> LayerOutput:  # fmt: skip
        """h_k from h_{k-1} and the embedding of the token k places ahead, `[B, L, D]` each."""
        both = jnp.concatenate([self.token_norm(token_BLD), self.stream_norm(x_BLD)], axis=-1)
        (merged_BLD,) = Dot()(both, merge=self.merge[...])
        output = self.block(merged_BLD, positions_BL, context, given)
        return output._replace(y=self.norm(output.y))


class Predictions(nnx.Module):
    """All depths, `depth_0` for the token one place ahead of the usual target, and so on."""

    def __init__(
        self, config: PredictingConfig, parts: LayerParts, init: Init, new_block: NewBlock
    ):
        for k in range(config.mtp_depth):
            own = within(init, f"depth_{k}")
            setattr(self, f"depth_{k}", Prediction(config, parts, own, new_block))


class Predicted(NamedTuple):
    """Results of the depths so far: h_k, states of slices, and auxiliary outputs by name."""

    x_BLD: jax.Array
    states: tuple = ()
    losses: dict[str, tuple[jax.Array, jax.Array]] = {}  # noqa: RUF012 - never changed
    sums: dict[str, jax.Array] = {}  # noqa: RUF012
    per_example: dict[str, jax.Array] = {}  # noqa: RUF012

    def with_depth(
        self, output: LayerOutput, loss: jax.Array, targets: jax.Array, config: PredictingConfig
    ) -> "Predicted":
        """Add a depth's output, and its summed loss over that many targets.

        Its weight is `mtp_weight` over the number of depths (DeepSeek-V3 report, equation 25).
        """
        k = len(self.states)
        here = jnp.arange(config.mtp_depth) == k
        own = {"mtp_loss": jax.lax.stop_gradient(loss), "mtp_targets": targets}
        own = {name: here.astype(value.dtype) * value for name, value in own.items()}
        of_block = {f"{name}_{k}": pair for name, pair in output.aux.losses.items()}
        weighted = config.mtp_weight / config.mtp_depth * loss, targets
        return Predicted(
            output.y,
            (*self.states, output.state),
            {**self.losses, **of_block, f"mtp_{k}": weighted},
            _added(self.sums, {**output.aux.sums, **own}),
            _added(self.per_example, output.aux.per_example),
        )

    @property
    def aux(self) -> Aux:
        """The auxiliary output of the layer."""
        return Aux(self.losses, self.sums, per_example=self.per_example)


def _added(before: dict[str, jax.Array], more: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: before[name] + value if before else value for name, value in more.items()}
