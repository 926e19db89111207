"""A recurrence over a sequence of which every device has a shard (context parallelism).

Devices have consecutive shards. Each computes what its tokens do to any state before them, their
summary, and all-gathers the summaries. It then folds those of the devices before it into the state
before its own first token, and runs over its own tokens from there. Convolutions read the last
inputs of the devices before, which are all-gathered likewise.

An all-gather receives n - 1 summaries in one message, F and B alike. A scan of permutes would
receive about log2(n) + 1, fewer from 8 devices on, but each waits for the one before, and for a
product of transitions in between. A summary has the size of K / V + 1 states however long the shard
is: 4 MiB of float32 for a row of 32 heads with K = V = 128, where the keys and values of a single
head of 128 are 8 MiB of bfloat16 for a shard of 16,384 tokens.

Shapes: B examples, L tokens of a device's shard, G key heads, R value heads for each of them, K and
V the widths of a key and of a value, T taps of a convolution, X channels.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.recurrent.chunks import Tokens, linear_recurrence

Tree = Any


def recurrence_of_shards(
    sequence: FullSequence, tokens: Tokens, state_BGRKV: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Return this device's outputs, and the state after the shards of all devices.

    Args:
      sequence: the devices that share the sequence, after the exchange of heads.
      tokens: what the recurrence reads of this device's shard.
      state_BGRKV: the state before the first shard, the same on all devices.
      chunk: as of `linear_recurrence`.
    """
    if sequence.size == 1:
        return linear_recurrence(tokens, state_BGRKV, chunk)
    summary = summarise(tokens, chunk)
    before, after = state_before_shard(sequence, summary, apply_summary, state_BGRKV)
    return linear_recurrence(tokens, before, chunk)[0], after


def summarise(tokens: Tokens, chunk: int) -> jax.Array:
    """What tokens do to any state before them: `transition @ state + added`.

    Returns:
      `added` and the transition, along the last dim: `[B, G, R, K, V + K]`, or without a rate, when
      each channel of the state only decays, `[B, G, R, K, V + 1]` with the transition's diagonal.
    """
    values, (*_, keys) = tokens.v_BLGRV, tokens.k_BLGK.shape
    b, _, g, r, width = values.shape
    wide = jnp.promote_types(values.dtype, jnp.float32)
    if tokens.rate_BLGR is None:
        _, added = linear_recurrence(tokens, jnp.zeros((b, g, r, keys, width), wide), chunk)
        passes = jnp.exp(tokens.decay_BLGR.astype(wide).sum(1)).reshape(b, g, r, -1, 1)
        if tokens.starts_BL is not None:
            passes = jnp.where(tokens.starts_BL.any(1).reshape(b, 1, 1, 1, 1), 0, passes)
        diagonal = jnp.broadcast_to(passes, (b, g, r, keys, 1))
        return jnp.concatenate([added, diagonal], -1)
    # All columns of a state have the same transition, which those of the identity show if their
    # values are zeros. Those of zeros show what is added.
    columns = jnp.eye(keys, width + keys, width, dtype=wide)
    padded = tokens._replace(v_BLGRV=jnp.pad(values, [(0, 0)] * 4 + [(0, keys)]))
    return linear_recurrence(padded, jnp.broadcast_to(columns, (b, g, r, *columns.shape)), chunk)[1]


def apply_summary(summary: jax.Array, state_BGRKV: jax.Array) -> jax.Array:
    """The state after tokens, from their summary and the state before them."""
    keys, width = state_BGRKV.shape[-2:]
    added, transition = summary[..., :width], summary[..., width:]
    if transition.shape[-1] == keys:
        return added + transition @ state_BGRKV
    return added + transition * state_BGRKV


def state_before_shard(
    sequence: FullSequence, summary: Tree, apply: Callable[[Tree, Tree], Tree], state: Tree
) -> tuple[Tree, Tree]:
    """Return the state before this device's shard, and the state after the shards of all devices.

    Args:
      sequence: the devices that share the sequence, with consecutive shards.
      summary: arrays `[B, ...]`: what this device's tokens do to a state.
      apply: `(summary, state) -> state`.
      state: before the first shard, the same on all devices.
    """
    every = jax.tree.map(lambda x: jnp.moveaxis(sequence.gather(x[:, None]), 1, 0), summary)
    own = sequence.start(1)

    def step(carry: tuple[Tree, Tree], shard: tuple[jax.Array, Tree]) -> tuple[Any, None]:
        (before, after), (number, of_shard) = carry, shard
        before = jax.tree.map(lambda x, y: jnp.where(number == own, y, x), before, after)
        return (before, apply(of_shard, after)), None

    return lax.scan(step, (state, state), (jnp.arange(sequence.size), every))[0]


def inputs_before_shard(
    sequence: FullSequence, x_BLX: jax.Array, before_BTX: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the T - 1 inputs before this device's shard, and the last T - 1 of all shards.

    A shard may be shorter than that.

    Args:
      sequence: the devices that share the sequence, after the exchange of heads.
      x_BLX: inputs of this device's shard.
      before_BTX: the T - 1 inputs before the first shard, the same on all devices.
    """
    length, reach = x_BLX.shape[1], before_BTX.shape[1]
    own = min(length, reach)
    ends = sequence.gather(x_BLX[:, length - own :])
    known = jnp.concatenate([before_BTX.astype(x_BLX.dtype), ends], 1)
    before = lax.dynamic_slice_in_dim(known, sequence.start(own), reach, axis=1)
    return before, known[:, known.shape[1] - reach :]
