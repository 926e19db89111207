"""Muon on the matrices of layers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpipe.config import OptimizerConfig
from jaxpipe.core.mesh import ParamSharding
from jaxpipe.optimizer.groups import Stores, groups

Tree = Any
_AT_ONCE = 2  # parameters that Muon handles at once: one is gathered while another is multiplied


def muon_on_matrices(
    config: OptimizerConfig, stored: Stores, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Muon on the matrices of layers, and `others` on all other parameters."""
    return optax.partition(
        {"muon": _muon(config, stored), "adam": others},
        lambda params: jax.tree.map(_muon_or_adam, groups(params, stored)),
    )


def _muon(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """Muon on the layers' parameters `[P, ...]`; each matrix is orthogonalised by itself.

    Padding with zeros stays zero and does not change the result. The layers of a run `[P, n, ...]`
    are handled one after the other, or the temporary arrays of all would be live.
    """

    def dims(how: ParamSharding) -> optax.contrib.MuonDimensionNumbers:
        return optax.contrib.MuonDimensionNumbers(*_matrix_dims(how))

    def orthogonal(tree: Tree) -> optax.GradientTransformation:
        return optax.contrib.scale_by_muon(
            beta=config.muon_momentum, weight_dimension_numbers=jax.tree.map(dims, tree)
        )

    def layer_by_layer(how: ParamSharding, update: Any, moment: Any, state: Any) -> jax.Array:
        def of_layer(how: ParamSharding, update: jax.Array, moment: jax.Array) -> jax.Array:
            return orthogonal(how).update(update, state._replace(mu=moment))[0]

        if how.lead == 1:
            return of_layer(how, update, moment)
        layers = (jnp.moveaxis(array, 1, 0) for array in (update, moment))
        alone = replace(how, lead=1)
        after = lax.map(lambda arrays: of_layer(alone, *arrays), tuple(layers))
        return jnp.moveaxis(after, 0, 1)

    def in_turn(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """optax's update, but each parameter waits for the one `_AT_ONCE` positions before.

        Otherwise XLA may start all parameters at once, and the temporary arrays of all are live.
        """
        after: list[jax.Array] = []

        def next_parameter(leaf: jax.Array, moment: jax.Array, how: ParamSharding) -> int:
            at = len(after)
            if at >= _AT_ONCE:  # both results must be read, or XLA drops one from the barrier
                before = at - _AT_ONCE
                leaf, after[before] = lax.optimization_barrier((leaf, after[before]))
            after.append(layer_by_layer(how, leaf, moment, state))
            return at

        numbers = jax.tree.map(next_parameter, updates, state.mu, stored(updates))
        # The moments use no barrier: `apply` also computes them alone, and XLA then removes the
        # orthogonalisation.
        moved = jax.tree.map(after.__getitem__, numbers)
        return moved, orthogonal(stored(updates)).update(updates, state)[1]

    def scale(update: jax.Array, how: ParamSharding) -> jax.Array:
        shape = how.unpadded_shape(update.shape)
        return update * (0.2 * max(shape[dim] for dim in _matrix_dims(how)) ** 0.5)

    sized = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, stored(updates)))
    direction = optax.GradientTransformation(optax.contrib.scale_by_muon().init, in_turn)
    return optax.chain(direction, sized)


def muon_rate(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """A transformation that scales Muon's updates, weight decay included, by `muon_lr / lr`."""
    ratio = config.muon_lr / config.lr

    def scale(updates: Tree, _: Tree) -> Tree:
        return jax.tree.map(
            lambda update, group: update * ratio if group == "matrix" else update,
            updates, groups(updates, stored),
        )  # fmt: skip

    return optax.stateless(scale)


def _matrix_dims(how: ParamSharding) -> tuple[int, int]:
    """Input and output dim of a parameter that holds matrices."""
    assert how.param.matrix is not None  # the parameter is of the group "matrix"
    one, other = how.param.matrix
    return how.lead + one, how.lead + other


def _muon_or_adam(group: str) -> str:
    return "muon" if group == "matrix" else "adam"
