"""Causal attention over the keys of a sequence that devices share, and that comes in slices.

In a ring every device computes with the keys it has while those of the device before it are in
flight (Liu et al. 2023, "Ring Attention"); a ring of one device sends nothing. A device's queries
of a slice are two chunks, one early and one late (zigzag sharding), so that each ring step has two
half blocks to compute, whichever device the keys are from. Queries attend to all keys of earlier
slices: a loop runs over these slices, and the keys of each go round like those of the current
slice. The backward pass goes round once more, and the gradients of keys and values follow behind
these. F leaves queries, output and log-sum-exp as residuals; keys and values of a device's own
tokens too, unless they are in the state that slices hand on.

In place of keys and values the ring may pass on what they are made of (`RingLayout.expand`): then
they exist for one block at a time, in F and again in B.

Shapes are those of `jaxpipe.model.attention.blocks`; L are a device's tokens of a slice, half of
them from each chunk, and S its tokens of all slices. Where keys are all-gathered, S are the tokens
of all devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.attention.blocks import (
    KEPT,
    AttentionOutput,
    BlockKernel,
    BlockOp,
    KeyBlock,
    KeyRange,
    QueryBlock,
    delay_residuals,
    skip_unseen,
)

Arrays = tuple[jax.Array, ...]
PullBack = Callable[..., tuple[Arrays, Arrays]]


@dataclass(frozen=True)
class RingLayout:
    """How keys reach the queries of a device.

    Attributes:
      sequence: the devices that hold the sequence's shards, in whose ring the keys go round.
      tokens: number of a slice's keys on this device.
      blocks: the kernel that computes blocks.
      expand: makes keys and values of the two arrays that are given in their place, and of weights;
        None: keys and values are given.
    """

    sequence: FullSequence
    tokens: int
    blocks: BlockKernel
    expand: Callable[..., tuple[jax.Array, jax.Array]] | None = None

    def open(self, there: KeyBlock, weights: Arrays) -> tuple[KeyBlock, PullBack]:
        """Keys and values of a block, and the function that maps their gradients to those given."""
        if self.expand is None:
            return there, lambda *at_keys: (at_keys, ())
        made, pull = jax.vjp(self.expand, *there[:2], *weights)

        def back(*at_keys: jax.Array) -> tuple[Arrays, Arrays]:
            gradients = pull(tuple(dy.astype(y.dtype) for dy, y in zip(at_keys, made)))
            wide = tuple(dx.astype(jnp.promote_types(dx.dtype, jnp.float32)) for dx in gradients)
            return wide[:2], wide[2:]

        return KeyBlock(*made, there.place_BS), back


class _Gradients(NamedTuple):
    """Gradients of queries, of the keys and values given, and of weights; in float32 or wider."""

    dq_BLHK: jax.Array
    at_keys: Arrays
    at_weights: Arrays


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    layout: RingLayout, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
    key_range: KeyRange, begin: jax.Array, sink_H: jax.Array | None = None,
    weights: Arrays = (),
) -> jax.Array:  # fmt: skip
    """Attention of every token to the keys in its `key_range`, `[B, L, H, K]`.

    The queries are tokens of the slice that starts at index `begin` of S. A device that has all
    keys of the slice, but only some of the queries, masks the slice's block. Each query also
    attends to the sink of its head (`AttentionOutput.with_sinks`), if there are sinks. `weights`
    are those of `layout.expand`.
    """
    return _forward(layout, q_BLHK, k_BSGK, v_BSGK, key_range, begin, sink_H, weights)[0]


def _forward(
    layout: RingLayout, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
    key_range: KeyRange, begin: jax.Array, sink_H: jax.Array | None, weights: Arrays,
) -> tuple[jax.Array, Any]:  # fmt: skip
    sequence, blocks, queries = layout.sequence, layout.blocks, QueryBlock(q_BLHK, key_range)
    slices = _SliceKeys(layout, k_BSGK, v_BSGK)

    def of_own(ring_step: int, there: KeyBlock, output: AttentionOutput | None) -> AttentionOutput:
        there, _ = layout.open(there, weights)
        if not ring_step:
            if q_BLHK.shape[1] == layout.tokens:
                return blocks.causal(queries, there)
            return blocks.attend_block(queries, there, key_range.mask(there.place_BS))
        late, which = _half_blocks(sequence, ring_step, blocks.attend_block, queries, there)
        early_made, late_made = _split_halves(output)
        late_made = late_made.merge(late)
        chosen = _choose_half(sequence, ring_step, early_made, late_made).merge(which)
        return _replace_half(sequence, ring_step, (early_made, late_made), chosen)

    def of_earlier(_: int, there: KeyBlock, output: AttentionOutput) -> AttentionOutput:
        there, _ = layout.open(there, weights)
        return output.merge(skip_unseen(blocks.attend_block, queries, there))

    def with_slice(index: jax.Array, output: AttentionOutput) -> AttentionOutput:
        return _fold_ring_steps(sequence, slices.keys(index * layout.tokens), of_earlier, output)

    output = _fold_ring_steps(sequence, slices.keys(begin), of_own)
    if slices.several:
        output = lax.fori_loop(*slices.before(begin, key_range), with_slice, output)
    if sink_H is not None:
        output = output.with_sinks(sink_H)
    output = AttentionOutput(output.mixed_BLHK.astype(q_BLHK.dtype), output.logsumexp_BLH)
    output = jax.tree.map(lambda x: checkpoint_name(x, KEPT), output)
    saved = q_BLHK, k_BSGK, v_BSGK, key_range, begin, sink_H, weights, output
    return output.mixed_BLHK, saved


def _backward(
    layout: RingLayout, saved: tuple[Any, ...], dmixed_BLHK: jax.Array
) -> tuple[Any, ...]:
    q_BLHK, k_BSGK, v_BSGK, key_range, begin, sink_H, weights, output = delay_residuals(
        saved, dmixed_BLHK
    )
    sequence, blocks = layout.sequence, layout.blocks
    queries = QueryBlock(q_BLHK, key_range, output, dmixed_BLHK)
    slices = _SliceKeys(layout, k_BSGK, v_BSGK)

    def of_own(ring_step: int, given: KeyBlock, gradients: _Gradients | None) -> _Gradients:
        """Gradients of queries, and of the current keys with what the devices before added."""
        there, back = layout.open(given, weights)
        if not ring_step:
            if q_BLHK.shape[1] == layout.tokens:
                dq, *at_keys = blocks.causal_gradients(queries, there)
            else:
                mask_B1LS = key_range.mask(there.place_BS)
                dq, *at_keys = blocks.block_gradients(queries, there, mask_B1LS)
            return _Gradients(dq, *back(*at_keys))
        arrived = sequence.rotate(gradients.at_keys)
        late, which = _half_blocks(sequence, ring_step, blocks.block_gradients, queries, there)
        early_dq, late_dq = _split_halves(gradients.dq_BLHK)
        late_dq = late_dq + late.dq_BLHK
        chosen = _choose_half(sequence, ring_step, early_dq, late_dq) + which.dq_BLHK
        dq = _replace_half(sequence, ring_step, (early_dq, late_dq), chosen)
        both = zip(late[1:], which[1:])
        at_keys, at_weights = back(
            *(_key_gradients(sequence, ring_step, *halves) for halves in both)
        )
        return _Gradients(dq, _add(arrived, at_keys), _add(gradients.at_weights, at_weights))

    def of_earlier(ring_step: int, given: KeyBlock, gradients: _Gradients) -> _Gradients:
        there, back = layout.open(given, weights)
        dq, *at_keys = skip_unseen(blocks.block_gradients, queries, there)
        at_keys, at_weights = back(*at_keys)
        if ring_step:
            at_keys = _add(sequence.rotate(gradients.at_keys), at_keys)
        return _Gradients(gradients.dq_BLHK + dq, at_keys, _add(gradients.at_weights, at_weights))

    def with_slice(index: jax.Array, gradients: _Gradients) -> _Gradients:
        place = index * layout.tokens
        of_slice = _fold_ring_steps(sequence, slices.keys(place), of_earlier, gradients)
        at_keys = slices.put(gradients.at_keys, sequence.rotate(of_slice.at_keys), place)
        return of_slice._replace(at_keys=at_keys)

    gradients = _fold_ring_steps(sequence, slices.keys(begin), of_own)
    nothing = jnp.zeros_like(k_BSGK), jnp.zeros_like(v_BSGK)
    at_keys = slices.put(nothing, sequence.rotate(gradients.at_keys), begin)
    gradients = gradients._replace(at_keys=at_keys)
    if slices.several:
        gradients = lax.fori_loop(*slices.before(begin, key_range), with_slice, gradients)
    dsink_H = None if sink_H is None else output.sink_gradients(sink_H, dmixed_BLHK)
    if weights:  # complete in B: W would need the gradients at keys and values of all blocks
        gradients = lax.optimization_barrier(gradients)
    dweights = tuple(dw.astype(weight.dtype) for dw, weight in zip(gradients.at_weights, weights))
    dq_BLHK = gradients.dq_BLHK.astype(q_BLHK.dtype)
    return dq_BLHK, *gradients.at_keys, None, None, dsink_H, dweights


ring_attention.defvjp(_forward, _backward)


def _add(some: Arrays, more: Arrays) -> Arrays:
    return tuple(one + other for one, other in zip(some, more, strict=True))


def slice_positions(sequence: FullSequence, own: int) -> jax.Array:
    """Positions of a device's `own` tokens in a slice, `[own]`; no constant if they count up."""
    if sequence.ring == 1:
        return sequence.start(own) + jnp.arange(own, dtype=jnp.int32)
    return sequence.positions(own)


class _SliceKeys:
    """The keys and values of a device in all slices of a sequence."""

    def __init__(self, layout: RingLayout, k_BSGK: jax.Array, v_BSGK: jax.Array):
        self.sequence, self.tokens = layout.sequence, layout.tokens
        self.whole = k_BSGK, v_BSGK
        self.several = k_BSGK.shape[1] > layout.tokens

    def keys(self, begin: jax.Array) -> KeyBlock:
        """Keys and values of the slice that starts at index `begin`."""
        parts = self.whole
        if self.several:
            parts = (lax.dynamic_slice_in_dim(x, begin, self.tokens, axis=1) for x in parts)
        place_S = begin * self.sequence.ring + slice_positions(self.sequence, self.tokens)
        shape = len(self.whole[0]), self.tokens
        return KeyBlock(*parts, jnp.broadcast_to(place_S.astype(jnp.int32), shape))

    def before(self, begin: jax.Array, key_range: KeyRange) -> tuple[Any, Any]:
        """Range of the earlier slices: the first that any query attends to, and the end.

        In a ring the range has all earlier slices, for devices that do not look back as far.
        """
        first = 0
        if key_range.first_BL is not None and self.sequence.ring == 1:
            first = jnp.maximum(key_range.first_BL.min(), 0) // self.tokens
        return first, begin // self.tokens

    def put(self, at_whole: Arrays, at_slice: Arrays, begin: jax.Array) -> Arrays:
        """Write a slice's gradients of keys and values into those of all slices.

        The slice has no gradients there before.
        """
        parts = tuple(part.astype(whole.dtype) for whole, part in zip(at_whole, at_slice))
        if not self.several:
            return parts
        return tuple(
            lax.dynamic_update_slice_in_dim(whole, part, begin, axis=1)
            for whole, part in zip(at_whole, parts)
        )


def _fold_ring_steps(
    sequence: FullSequence, keys: KeyBlock, of_step: Callable[[int, KeyBlock, Any], Any],
    folded: Any = None,
) -> Any:  # fmt: skip
    """Fold `of_step` over the ring steps: own keys first, then those of the device before.

    The barrier lets only the next step's keys be in flight during a step. Without it a scheduler
    could start all later permutes at once, with no blocks left to hide them.
    """
    for ring_step in range(sequence.ring - 1):
        coming = sequence.rotate(keys)
        folded, keys = lax.optimization_barrier((of_step(ring_step, keys, folded), coming))
    return of_step(sequence.ring - 1, keys, folded)


def _half_blocks(
    sequence: FullSequence, ring_step: int, op: BlockOp, queries: QueryBlock, there: KeyBlock
) -> tuple[Any, Any]:
    """The two half blocks of a ring step.

    Late queries attend to all early keys. If the keys are from a device before this one, early
    queries attend to its early keys too; if from one behind, late queries attend to its late keys.
    """
    (early, late), (early_keys, late_keys) = _split_halves(queries), _split_halves(there)
    chosen = (
        _choose_half(sequence, ring_step, early, late),
        _choose_half(sequence, ring_step, early_keys, late_keys),
    )
    return skip_unseen(op, late, early_keys), skip_unseen(op, *chosen)


def _is_from_earlier_device(sequence: FullSequence, ring_step: int) -> jax.Array:
    """Whether the current keys are from a device before this one, which has earlier keys."""
    return sequence.index() >= ring_step


def _choose_half(sequence: FullSequence, ring_step: int, early: Any, late: Any) -> Any:
    before = _is_from_earlier_device(sequence, ring_step)
    return jax.tree.map(lambda *both: jnp.where(before, *both), early, late)


def _replace_half(
    sequence: FullSequence, ring_step: int, halves: tuple[Any, Any], chosen: Any
) -> Any:
    """Concatenate early and late half, one of which is replaced by `chosen`."""
    before = _is_from_earlier_device(sequence, ring_step)

    def whole(early: jax.Array, late: jax.Array, new: jax.Array) -> jax.Array:
        parts = [jnp.where(before, new, early), jnp.where(before, late, new)]
        return jnp.concatenate(parts, 1)

    return jax.tree.map(whole, *halves, chosen)


def _key_gradients(
    sequence: FullSequence, ring_step: int, of_late: jax.Array, of_chosen: jax.Array
) -> jax.Array:
    """Key gradients of a ring step: of late queries at early keys, and of the other block."""
    before, nothing = _is_from_earlier_device(sequence, ring_step), jnp.zeros_like(of_late)
    early = of_late + jnp.where(before, of_chosen, nothing)
    return jnp.concatenate([early, jnp.where(before, nothing, of_chosen)], 1)


def _split_halves(tree: Any) -> tuple[Any, Any]:
    """The early and the late chunk of all leaves `[B, L, ...]`."""
    early = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)
    return early, jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)
