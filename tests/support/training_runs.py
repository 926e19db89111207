"""Short trainings of a `Trainer`, and its state in the form that checkpoints have."""

import jax
import numpy as np

from jaxpipe.checkpoint import StateKeying


def train_on_random_tokens(trainer, state, steps, *, vocab_size, shape):
    """Train on ids `shape` = `[M, B, L + 1]` drawn per step; return the state and the losses."""
    losses = []
    for step in steps:
        ids = np.random.default_rng(step).integers(0, vocab_size, shape, np.int32)
        batch = trainer.put({"inputs": ids[..., :-1], "targets": ids[..., 1:]})
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def keying(trainer):
    return StateKeying(trainer.layout, trainer.sharding)


def keyed(trainer, state):
    """The state as arrays by layer, whatever the mesh."""
    return jax.tree.map(np.asarray, keying(trainer).to_keyed(state.parts()))
