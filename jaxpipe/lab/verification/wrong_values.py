"""Batches on the devices and states with a fault in each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lab.verification.steps import Float64Trainer
from jaxpipe.model.loss import IGNORE
from jaxpipe.training.state import State

Tree = Any


def swap_microbatches(batch: Tree, trainer: Float64Trainer) -> Tree:
    """The first two microbatches stand in each other's place."""
    slices = trainer.schedule.slices

    def swap(leaf: jax.Array) -> jax.Array:
        parts = [leaf[slices : 2 * slices], leaf[:slices], leaf[2 * slices :]]
        return jnp.concatenate(parts)

    return jax.tree.map(swap, batch)


def ignore_row(batch: Tree, trainer: Float64Trainer) -> Tree:
    """The first row of the first microbatch has no targets."""
    return batch | {"targets": batch["targets"].at[0, 0].set(IGNORE)}


def shift_positions(batch: Tree, trainer: Float64Trainer) -> Tree:
    """In the first microbatch the positions of later tokens are one too many."""
    config, slices, positions = trainer.config, trainer.schedule.slices, batch.get("positions")
    if positions is None:
        length = batch["inputs"].shape[2] * config.parallel.cp * slices
        sizes = (*config.batch_shape.values(), length)
        every = np.broadcast_to(np.arange(length, dtype=np.int32), sizes)
        positions = jnp.asarray(trainer.sharder.shard({"positions": every})["positions"])
    late = (positions > 1) & (jnp.arange(len(positions)) < slices)[:, None, None]
    return batch | {"positions": positions + late.astype(positions.dtype)}


def join_documents(batch: Tree, trainer: Float64Trainer) -> Tree:
    """Packed rows count as one document each, for code that reads segments or positions."""
    segments, positions = batch["segments"], batch["positions"]
    late = (segments > 0) * trainer.config.train.seq_len
    joined = {"positions": positions + late.astype(positions.dtype)}
    return batch | joined | {"segments": jnp.minimum(segments, 0)}


def unmark_padding(batch: Tree, trainer: Float64Trainer) -> Tree:
    """Padding counts as tokens."""
    return batch | {"real": jnp.ones_like(batch["real"])}


def delay_ahead(batch: Tree, trainer: Float64Trainer) -> Tree:
    """Each position predicts from the token before the one that it should read."""
    return batch | {"inputs_ahead_1": jnp.roll(batch["inputs_ahead_1"], 1, axis=2)}


def swap_shards(batch: Tree, trainer: Float64Trainer) -> Tree:
    """The first two replicas that share a sequence have each other's tokens."""
    size, inputs = trainer.config.train.microbatch_size, batch["inputs"]
    parts = [inputs[:, size : 2 * size], inputs[:, :size], inputs[:, 2 * size :]]
    return batch | {"inputs": jnp.concatenate(parts, axis=1)}


def swap_slices(batch: Tree, trainer: Float64Trainer) -> Tree:
    """The first two slices of a sequence have each other's tokens."""
    inputs = batch["inputs"]
    return batch | {"inputs": jnp.concatenate([inputs[1:2], inputs[:1], inputs[2:]])}


def can_swap_layers(trainer: Float64Trainer) -> bool:
    """Whether the first and the last pipeline rank both have a layer in the first slot."""
    first = [row[0] for row in trainer.layout.layer_table]
    return len(first) > 1 and None not in (first[0], first[-1])


def swap_layers(state: State) -> State:
    """The first and the last pipeline rank have each other's layer."""

    def swap(leaf: jax.Array) -> jax.Array:
        return leaf.at[jnp.array([0, -1])].set(leaf[jnp.array([-1, 0])])

    first, *rest = state.params["layers"]
    layers = (jax.tree.map(swap, first), *rest)
    return state._replace(params=state.params | {"layers": layers})


def zero_variables(state: State) -> State:
    """Layers read zeros in the place of variables."""
    return state._replace(variables=jax.tree.map(jnp.zeros_like, state.variables))


def make_stage_stale(before: State, after: State) -> State:
    """The last pipeline rank's layers are those of the step before."""

    def stale(new: jax.Array, old: jax.Array) -> jax.Array:
        return new.at[-1].set(old[-1])

    layers = jax.tree.map(stale, after.params["layers"], before.params["layers"])
    return after._replace(params=after.params | {"layers": layers})


def forget_moments(state: State) -> State:
    """Moments are those of a new run."""
    return state._replace(optimizer=_zeros(state.optimizer, jnp.floating))


def forget_counts(state: State) -> State:
    """The optimizer counts its updates from 0."""
    return state._replace(optimizer=_zeros(state.optimizer, jnp.integer))


def _zeros(tree: Tree, kind: Any) -> Tree:
    """The tree with zeros in its leaves of a kind of dtypes."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, kind) else leaf, tree
    )
