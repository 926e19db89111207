"""Optimizers of a run's own, whose state is not shaped like the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

BLOCK = 32


class PerParameter(NamedTuple):
    """A count, and for every parameter a dict of arrays."""

    count: jax.Array
    arrays: Any


def _one_by_one(init, update, learning_rate):
    """Return an optimizer from `init(param)` and `update(gradient, arrays) -> (step, arrays)`."""

    def init_all(params):
        return PerParameter(jnp.int32(0), jax.tree.map(init, params))

    def update_all(gradients, state, params):
        leaves, tree = jax.tree.flatten(gradients)
        made = list(map(update, leaves, tree.flatten_up_to(state.arrays)))
        rate = learning_rate(state.count)
        steps = tree.unflatten([-rate * step for step, _ in made])
        return steps, PerParameter(state.count + 1, tree.unflatten([kept for _, kept in made]))

    return optax.GradientTransformation(init_all, update_all)


def shampoo(learning_rate, config):
    """Shampoo: a matrix has a square preconditioner on either side, a vector squares."""

    def init(param):
        if param.ndim == 2:
            rows, columns = param.shape
            return {"left": 0.1 * jnp.eye(rows, dtype=param.dtype),
                    "right": 0.1 * jnp.eye(columns, dtype=param.dtype)}  # fmt: skip
        return {"squares": jnp.full_like(param, 0.1)}

    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * values[None] ** -0.25) @ vectors.T

    def update(gradient, kept):
        if gradient.ndim == 2:
            left = kept["left"] + gradient @ gradient.T
            right = kept["right"] + gradient.T @ gradient
            return root(left) @ gradient @ root(right), {"left": left, "right": right}
        squares = kept["squares"] + gradient**2
        return gradient * squares**-0.5, {"squares": squares}

    return _one_by_one(init, update, learning_rate)


def eight_bit(learning_rate, config):
    """Momentum in int8, with a scale for every block and the mean of each parameter's squares."""

    def blocks(leaf):
        flat = leaf.ravel()
        return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)

    def quantised(leaf):
        scale = jnp.abs(leaf).max(1) / 127 + 1e-12
        return {"int8": jnp.round(leaf / scale[:, None]).astype(jnp.int8), "scale": scale}

    def init(param):
        return quantised(blocks(jnp.zeros_like(param))) | {"mean": jnp.zeros((), param.dtype)}

    def update(gradient, kept):
        momentum = config.beta1 * kept["int8"] * kept["scale"][:, None] + blocks(gradient)
        mean = kept["mean"] + jnp.mean(gradient**2)
        step = momentum.ravel()[: gradient.size].reshape(gradient.shape) * (mean + 1e-8) ** -0.5
        return step, quantised(momentum) | {"mean": mean}

    return _one_by_one(init, update, learning_rate)


def clipped(learning_rate, config):
    """Adam with a norm over all parameters."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


def counted(learning_rate, config):
    """Prodigy, which keeps numbers of all parameters together."""
    return optax.contrib.prodigy(learning_rate)


def noisy(learning_rate, config):
    """Add noise to gradients."""
    return optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(learning_rate))


def no_optimizer(learning_rate, config):
    """Return something else."""
    return learning_rate


def needs_more(learning_rate, config, momentum):
    """Take another argument."""
    return optax.sgd(learning_rate, momentum)


def needs_a_loss(learning_rate, config):
    """Read the loss in `update`."""
    return optax.contrib.momo(learning_rate)


NUMBER = 3
