"""The optimizers by name, and how one is built on stage-stacked parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import jax
import optax

from jaxpipe.config import ConfigError, OptimizerConfig, is_custom
from jaxpipe.core.mesh.flags import is_trained, merge, select
from jaxpipe.optimizer.custom import load_custom
from jaxpipe.optimizer.groups import Stores, weight_decay
from jaxpipe.optimizer.layerwise import layerwise
from jaxpipe.optimizer.muon import muon_on_matrices, muon_rate
from jaxpipe.optimizer.rate import learning_rate

Tree = Any


@dataclass(frozen=True)
class Ingredients:
    """What an optimizer is built from.

    Attributes:
      config: the section `[optimizer]`.
      rate: the learning rate as a function of the number of updates before.
      stored: `Sharding.param_shardings`; it tells which parameters are matrices, and their dims.
    """

    config: OptimizerConfig
    rate: optax.Schedule
    stored: Stores

    def descend(
        self, direction: optax.GradientTransformation, *after: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """The update against `direction` with decoupled weight decay, at the learning rate.

        `after` changes the direction once the decay is added to it.
        """
        decay = weight_decay(self.config, self.stored)
        decay = optax.chain(decay, *after) if after else decay
        return optax.chain(direction, decay, optax.scale_by_learning_rate(self.rate))


class Kind(NamedTuple):
    """How an optimizer of the table is built, and what it needs.

    Attributes:
      make: the transformation from its ingredients.
      is_elementwise: whether every value is updated from what stands at its own position, with the
        same bits in every program. A device can then apply it to its own shards in the
        program of several steps. Others need the full matrices of a layer, or round differently
        where XLA fuses them differently (schedule-free's averages).
      is_per_matrix: whether it updates matrices of layers one by one and everything else
        elementwise, so that a device which stores full matrices can apply it there, too.
    """

    make: Callable[[Ingredients], optax.GradientTransformation]
    is_elementwise: bool = True
    is_per_matrix: bool = False


def _adam(config: OptimizerConfig, *, nesterov: bool = False) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps, nesterov=nesterov)


def _lion(ingredients: Ingredients) -> optax.GradientTransformation:
    config = ingredients.config
    return ingredients.descend(optax.scale_by_lion(config.beta1, config.beta2))


def _adafactor(ingredients: Ingredients) -> optax.GradientTransformation:
    """optax's Adafactor with its defaults, except that the decay follows the learning rate."""
    direction = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return ingredients.descend(layerwise(direction, ingredients.stored))


def _muon(ingredients: Ingredients) -> optax.GradientTransformation:
    config, stored = ingredients.config, ingredients.stored
    after = [muon_rate(config, stored)] if config.muon_lr else []
    return ingredients.descend(muon_on_matrices(config, stored, _adam(config)), *after)


def _schedule_free(ingredients: Ingredients) -> optax.GradientTransformation:
    config = ingredients.config
    square = optax.scale_by_rms(config.beta2, config.eps, eps_in_sqrt=False, bias_correction=True)
    # optax's schedule-free counts updates from 1.
    rate = lambda count: ingredients.rate(count - 1)  # noqa: E731
    return optax.contrib.schedule_free(ingredients.descend(square), rate, config.beta1)


KINDS = {
    "adafactor": Kind(_adafactor, is_elementwise=False),
    "adamw": Kind(lambda parts: parts.descend(_adam(parts.config))),
    "lion": Kind(_lion),
    "muon": Kind(_muon, is_elementwise=False, is_per_matrix=True),
    "nadamw": Kind(lambda parts: parts.descend(_adam(parts.config, nesterov=True))),
    "schedule_free": Kind(_schedule_free, is_elementwise=False),
    "sgd": Kind(lambda parts: parts.descend(optax.trace(parts.config.beta1))),
}
_CUSTOM = Kind(
    lambda parts: layerwise(load_custom(parts.config, parts.rate), parts.stored),
    is_elementwise=False,
)


def kind_of(name: str) -> Kind:
    """The kind of an `optimizer.name`; raises `ConfigError` where the table has no such name."""
    if is_custom(name):
        return _CUSTOM
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=1)
        raise ConfigError(
            f"unknown optimizer.name={name!r}: use one of {', '.join(map(repr, KINDS))}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}, or 'module:function' for your own."
        )
    return KINDS[name]


def build(config: OptimizerConfig, steps: int, stored: Stores) -> optax.GradientTransformation:
    """The configured optimizer on stage-stacked trees, without clipping.

    Weight decay is decoupled and multiplied by the learning rate. The optimizers are Adafactor
    (Shazeer and Stern 2018), AdamW (Loshchilov and Hutter 2019) and NAdamW, which is AdamW with
    Nesterov's momentum (Dozat 2016), Lion (Chen et al. 2023), Muon (Jordan et al. 2024),
    schedule-free AdamW (Defazio et al. 2024; the average's weights are those of the authors'
    released code, without the bias correction of the paper's rate), whose beta1 weighs the average
    of the iterates, and SGD with the momentum beta1. Muon applies to the layers' matrices, with
    updates scaled to the size of Adam's (Liu et al. 2025, "Muon is scalable", equation 4); Adam
    applies to all other parameters.

    Args:
      config: the section `[optimizer]`.
      steps: updates in the run.
      stored: `Sharding.param_shardings`; it tells which parameters are matrices, and their dims.

    Raises `ConfigError` for an unknown name, or a function that returns no optimizer.
    """
    ingredients = Ingredients(config, learning_rate(config, steps), stored)
    return _of_trained(kind_of(config.name).make(ingredients), stored)


def _of_trained(
    inner: optax.GradientTransformation, stored: Stores
) -> optax.GradientTransformation:
    """The optimizer with state and updates of trained parameters alone; None for frozen ones."""

    def trained(params: Tree) -> Tree:
        return select(is_trained(stored(params)), params)

    return optax.GradientTransformation(
        lambda params: inner.init(trained(params)),
        lambda gradients, state, params: inner.update(gradients, state, trained(params)),
    )


def has_average(moments: Tree) -> bool:
    """Whether the state of the optimizer has the average that is evaluated (schedule-free)."""
    return isinstance(moments, optax.contrib.ScheduleFreeState)


def averaged(moments: Tree, params: Tree) -> Tree:
    """The parameters to evaluate: `params`, or their average where the optimizer is schedule-free.

    `moments` is the state of the optimizer from `build`.
    """
    if not has_average(moments):
        return params
    trained = jax.tree.map(lambda leaf, z: z is not None, params, moments.z)
    average = optax.contrib.schedule_free_eval_params(moments, select(trained, params))
    return merge(trained, average, params)
