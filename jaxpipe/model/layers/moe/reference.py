"""Reference implementation of the dispatch: all experts take all tokens, with a one-hot mask."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.moe.experts import Experts, Made, own_of_batches
from jaxpipe.model.layers.parts import Dot


@dataclass(frozen=True)
class OneHot:
    """All experts on one device, in plain einsums over tokens x experts."""

    config: MixtureConfig

    def __call__(
        self,
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        choice_BLK: jax.Array,
        experts: Experts,
        dot: Dot,
    ) -> Made:
        """See `Dispatch`."""
        count, factor = self.config.n_experts, self.config.capacity_factor
        examples, length, copies = choice_BLK.shape
        chosen_BLKE = jax.nn.one_hot(choice_BLK, count, dtype=x_BLD.dtype)
        chosen = chosen_BLKE.sum()
        if factor:
            rows = chosen_BLKE.reshape(examples, length * copies, count)
            before = (jnp.cumsum(rows, axis=1) - rows).reshape(chosen_BLKE.shape)
            tokens_B = rows.sum((1, 2)) / copies
            room_B = factor * tokens_B * copies / count
            chosen_BLKE *= before < room_B[:, None, None, None]
        weights_BLE = jnp.einsum("BLKE,BLK->BLE", chosen_BLKE, weights_BLK)
        x_END = jnp.broadcast_to(x_BLD.reshape(1, -1, x_BLD.shape[-1]), (count, *_tokens(x_BLD)))
        weights_EN1 = jnp.moveaxis(weights_BLE, -1, 0).reshape(count, -1, 1)
        at_inputs, at_outputs = weights_EN1, jnp.ones_like(weights_EN1)
        if not self.config.VARIANT.weighs_inputs:
            at_inputs, at_outputs = at_outputs, at_inputs
        outputs_END = experts(x_END, at_inputs, dot, own_of_batches) * at_outputs
        dropped = (chosen - chosen_BLKE.sum()).astype(jnp.int32)
        return outputs_END.sum(axis=0).reshape(x_BLD.shape), dropped


def one_hot(config: MixtureConfig, *_: object) -> OneHot:
    """The dispatch of a model, whatever replicas and products (`CausalDecoder.dispatch`)."""
    return OneHot(config)


def _tokens(x_BLD: jax.Array) -> tuple[int, int]:
    return x_BLD.shape[0] * x_BLD.shape[1], x_BLD.shape[2]
