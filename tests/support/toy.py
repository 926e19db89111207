"""A small model with everything that can go wrong: matrices, vectors, masks, uneven targets."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions

IGNORE = -100
VOCAB, WIDTH, LENGTH = 11, 8, 6
NOT_FINITE = 2**30  # a position at which layers make values that are not finite


def _embed(shared, microbatch):
    return shared["embed"][microbatch["inputs"]]


def place_of(context):
    """The number of each token in its document, from 1, `[B, L, 1]`; 0 where it is NOT_FINITE."""
    positions = context.rows["positions"][..., None]
    return jnp.where(positions == NOT_FINITE, 0, 1 + positions)


def _layer(params, x, context):
    scaled = x * params["gain"][None, None] / jnp.sqrt(1 + jnp.mean(x * x, axis=-1, keepdims=True))
    mixed = jnp.cumsum(scaled, axis=1) / place_of(context).astype(x.dtype)
    hidden = jax.nn.silu(mixed @ params["up"]) * (scaled @ params["gate"])
    return LayerOutput(x + hidden @ params["down"])


def _head(shared, x, microbatch):
    logits = (x * shared["norm"][None, None]) @ shared["head"]
    valid = microbatch["targets"] != IGNORE
    picked = jnp.where(valid, microbatch["targets"], 0)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), picked[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(valid, losses, 0))


def _count(microbatch):
    return jnp.sum(microbatch["targets"] != IGNORE)


KIND = LayerKind(_layer)
TOY = StageFunctions(_embed, KIND, _head, _count)


def toy_params(seed, layers, dtype=jnp.float32):
    """Return `(shared, [layer, ...])` of random parameters, as NumPy arrays."""

    def normal(index, *shape):
        drawn = np.random.default_rng([seed, index]).normal(size=shape) / shape[0] ** 0.5
        return drawn.astype(dtype)

    return _params(normal, layers)


def init_toy(key, layers, dtype=jnp.float32):
    """Return what `toy_params` does, drawn by jax from a key, which may be traced."""

    def normal(index, *shape):
        return jax.random.normal(jax.random.fold_in(key, index), shape, dtype) / shape[0] ** 0.5

    return _params(normal, layers)


def _params(normal, layers):
    shared = {
        "embed": normal(0, VOCAB, WIDTH) * 3,
        "norm": 1 + 0.1 * normal(1, WIDTH),
        "head": normal(2, WIDTH, VOCAB),
    }
    layers = [
        {
            "gain": 1 + 0.1 * normal(10 * i + 3, WIDTH),
            "up": normal(10 * i + 4, WIDTH, 2 * WIDTH),
            "gate": normal(10 * i + 5, WIDTH, 2 * WIDTH),
            "down": normal(10 * i + 6, 2 * WIDTH, WIDTH),
        }
        for i in range(layers)
    ]
    return shared, layers


def toy_batch(seed, microbatches, examples, ignore="some"):
    """Return rows `[M, B, L]`, no two examples alike, with some targets ignored.

    `ignore`: none, some (unevenly), or whole (one microbatch entirely).
    """
    random = np.random.default_rng(seed)  # jax's would compile a program for every shape
    shape, count = (microbatches, examples, LENGTH), microbatches * examples
    targets = random.integers(VOCAB, size=shape)
    if ignore != "none":
        chance = np.linspace(0.1, 0.8, count).reshape(*shape[:2], 1)
        targets = np.where(random.random(shape) < chance, IGNORE, targets)
    if ignore == "whole":
        targets[microbatches // 2] = IGNORE
    batch = {
        "inputs": random.integers(VOCAB, size=shape),
        "targets": targets,
        "positions": np.arange(LENGTH) + random.permutation(count).reshape(*shape[:2], 1),
    }
    return jax.device_get(jax.tree.map(jnp.asarray, batch))  # in jax's widths of integers
