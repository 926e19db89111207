"""Causal attention over the keys of a sequence that devices share, and that comes in slices.

Every device computes with the keys that are here while those of the device before it are on their
way, in a ring (Liu et al. 2023, "Ring Attention"); a ring of one device is that device. Of a slice
its queries are of two stretches, one early and one late, so that in each turn it has two half
blocks to make, whichever device the keys are of (the order is known as zigzag). Of the slices
before, queries see all keys: a loop goes over as many slices as there are, and the keys of each go
round like those of the last. The gradient goes round once more, with the gradients at keys and
values behind these. F leaves queries, what they mix and the log of the sum over all keys; keys and
values of a device's own tokens too, or these are in the state that slices hand on.

Shapes are those of `jaxpipe.model.blocks`; L are a device's tokens of a slice, half of them of each
stretch, and S those of all slices. Where keys are gathered, S are the tokens of all devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.model.blocks import (
    KEPT,
    Blocks,
    Gradients,
    Keys,
    Made,
    Op,
    Queries,
    Sight,
    in_backward,
    of_seen,
)
from jaxpipe.partition.sequence import WholeSequence


@dataclass(frozen=True)
class Course:
    """How keys come to the queries of a device.

    Attributes:
      sequence: which of them other devices have, in whose ring they go round.
      tokens: those of a slice that are here.
      blocks: what makes blocks of those that are here.
    """

    sequence: WholeSequence
    tokens: int
    blocks: Blocks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    course: Course, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, sight: Sight,
    begin: jax.Array,
) -> jax.Array:  # fmt: skip
    """Attention of every token to those that it sees, `[B, L, H, K]`.

    They are tokens of the slice that begins at token `begin` of S. A device that has all keys of
    the slice, but only some of the queries, masks the slice's.
    """
    return _forward(course, q_BLHK, k_BSGK, v_BSGK, sight, begin)[0]


def _forward(
    course: Course, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, sight: Sight,
    begin: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
    sequence, blocks, queries = course.sequence, course.blocks, Queries(q_BLHK, sight)
    slices = _Slices(course, k_BSGK, v_BSGK)

    def of_own(turn: int, there: Keys, made: Made | None) -> Made:
        if not turn:
            if q_BLHK.shape[1] == course.tokens:
                return blocks.causal(queries, there)
            return blocks.attended(queries, there, sight.mask(there.place_BS))
        late, which = _late_and_chosen(sequence, turn, blocks.attended, queries, there)
        early_made, late_made = _halves(made)
        late_made = late_made.with_more(late)
        chosen = _chosen(sequence, turn, early_made, late_made).with_more(which)
        return _put_back(sequence, turn, (early_made, late_made), chosen)

    def of_earlier(_: int, there: Keys, made: Made) -> Made:
        return made.with_more(of_seen(blocks.attended, queries, there))

    def with_slice(index: jax.Array, made: Made) -> Made:
        return _around(sequence, slices.keys(index * course.tokens), of_earlier, made)

    made = _around(sequence, slices.keys(begin), of_own)
    if slices.several:
        made = lax.fori_loop(*slices.before(begin, sight), with_slice, made)
    made = Made(made.mixed_BLHK.astype(q_BLHK.dtype), made.logsumexp_BLH)
    made = jax.tree.map(lambda x: checkpoint_name(x, KEPT), made)
    return made.mixed_BLHK, (q_BLHK, k_BSGK, v_BSGK, sight, begin, made)


def _backward(course: Course, kept: tuple[Any, ...], dmixed_BLHK: jax.Array) -> tuple[Any, ...]:
    q_BLHK, k_BSGK, v_BSGK, sight, begin, made = in_backward(kept, dmixed_BLHK)
    sequence, blocks = course.sequence, course.blocks
    queries = Queries(q_BLHK, sight, made, dmixed_BLHK)
    slices = _Slices(course, k_BSGK, v_BSGK)

    def of_own(turn: int, there: Keys, found: Gradients | None) -> Gradients:
        """Beside those at queries, those at the keys that are here, of the devices before."""
        if not turn:
            if q_BLHK.shape[1] == course.tokens:
                return blocks.causal_gradients(queries, there)
            return blocks.gradients(queries, there, sight.mask(there.place_BS))
        dq, *at_keys = found
        arrived = sequence.turned(at_keys)
        late, which = _late_and_chosen(sequence, turn, blocks.gradients, queries, there)
        early_dq, late_dq = _halves(dq)
        late_dq = late_dq + late.dq_BLHK
        chosen = _chosen(sequence, turn, early_dq, late_dq) + which.dq_BLHK
        dq = _put_back(sequence, turn, (early_dq, late_dq), chosen)
        at_keys = [
            behind + _at_halves(sequence, turn, of_late, of_chosen)
            for behind, of_late, of_chosen in zip(arrived, late[1:], which[1:])
        ]
        return Gradients(dq, *at_keys)

    def of_earlier(turn: int, there: Keys, found: Gradients) -> Gradients:
        dq, *at_keys = of_seen(blocks.gradients, queries, there)
        if turn:
            at_keys = map(jnp.add, sequence.turned(found[1:]), at_keys)
        return Gradients(found.dq_BLHK + dq, *at_keys)

    def with_slice(index: jax.Array, found: Gradients) -> Gradients:
        place = index * course.tokens
        of_slice = _around(sequence, slices.keys(place), of_earlier, found)
        at_keys = slices.put(found[1:], sequence.turned(of_slice[1:]), place)
        return Gradients(of_slice.dq_BLHK, *at_keys)

    of_slice = _around(sequence, slices.keys(begin), of_own)
    nothing = jnp.zeros_like(k_BSGK), jnp.zeros_like(v_BSGK)
    at_keys = slices.put(nothing, sequence.turned(of_slice[1:]), begin)
    found = Gradients(of_slice.dq_BLHK, *at_keys)
    if slices.several:
        found = lax.fori_loop(*slices.before(begin, sight), with_slice, found)
    return *found._replace(dq_BLHK=found.dq_BLHK.astype(q_BLHK.dtype)), None, None


ring_attention.defvjp(_forward, _backward)


def places_in_slice(sequence: WholeSequence, own: int) -> jax.Array:
    """Where in a slice a device's `own` tokens stand, `[own]`: no constant where they count up."""
    if sequence.ring == 1:
        return sequence.start(own) + jnp.arange(own, dtype=jnp.int32)
    return sequence.places(own)


class _Slices:
    """The keys and values of a device in slices of a sequence."""

    def __init__(self, course: Course, k_BSGK: jax.Array, v_BSGK: jax.Array):
        self.sequence, self.tokens = course.sequence, course.tokens
        self.whole = k_BSGK, v_BSGK
        self.several = k_BSGK.shape[1] > course.tokens

    def keys(self, begin: jax.Array) -> Keys:
        """Those of the slice that begins there."""
        parts = self.whole
        if self.several:
            parts = (lax.dynamic_slice_in_dim(x, begin, self.tokens, axis=1) for x in parts)
        place_S = begin * self.sequence.ring + places_in_slice(self.sequence, self.tokens)
        shape = len(self.whole[0]), self.tokens
        return Keys(*parts, jnp.broadcast_to(place_S.astype(jnp.int32), shape))

    def before(self, begin: jax.Array, sight: Sight) -> tuple[Any, Any]:
        """The first of the slices before it that any query sees, and the end of these.

        Where keys go round they are all slices, for devices that do not see as far back.
        """
        first = 0
        if sight.first_BL is not None and self.sequence.ring == 1:
            first = jnp.maximum(sight.first_BL.min(), 0) // self.tokens
        return first, begin // self.tokens

    def put(self, at_whole: Any, at_slice: Any, begin: jax.Array) -> list[jax.Array]:
        """The gradients at all keys and values with those of a slice, which has none yet."""
        parts = [part.astype(whole.dtype) for whole, part in zip(at_whole, at_slice)]
        if not self.several:
            return parts
        return [
            lax.dynamic_update_slice_in_dim(whole, part, begin, axis=1)
            for whole, part in zip(at_whole, parts)
        ]


def _around(
    sequence: WholeSequence, keys: Keys, with_turn: Callable[[int, Keys, Any], Any],
    made: Any = None,
) -> Any:  # fmt: skip
    """What is made of own keys, and of those of the device so many turns before, one by one.

    The next keys are on their way meanwhile, and no others: those after them set out when a turn's
    blocks are made, or else a scheduler could have all of them come at once, behind nothing.
    """
    for turn in range(sequence.ring - 1):
        coming = sequence.turned(keys)
        made, keys = lax.optimization_barrier((with_turn(turn, keys, made), coming))
    return with_turn(sequence.ring - 1, keys, made)


def _late_and_chosen(
    sequence: WholeSequence, turn: int, op: Op, queries: Queries, there: Keys
) -> tuple[Any, Any]:
    """The two half blocks of a turn.

    Late queries see all early keys. If the keys are of a device before this one, early queries see
    its early keys too; if of one behind, late queries see its late keys.
    """
    (early, late), (early_keys, late_keys) = _halves(queries), _halves(there)
    chosen = _chosen(sequence, turn, early, late), _chosen(sequence, turn, early_keys, late_keys)
    return of_seen(op, late, early_keys), of_seen(op, *chosen)


def _from_before(sequence: WholeSequence, turn: int) -> jax.Array:
    """Whether the keys that are here are of a device with earlier ones."""
    return sequence.index() >= turn


def _chosen(sequence: WholeSequence, turn: int, early: Any, late: Any) -> Any:
    before = _from_before(sequence, turn)
    return jax.tree.map(lambda *both: jnp.where(before, *both), early, late)


def _put_back(sequence: WholeSequence, turn: int, halves: tuple[Any, Any], chosen: Any) -> Any:
    """Both halves in one, of which one is what was made of the chosen one."""
    before = _from_before(sequence, turn)

    def whole(early: jax.Array, late: jax.Array, new: jax.Array) -> jax.Array:
        parts = [jnp.where(before, new, early), jnp.where(before, late, new)]
        return jnp.concatenate(parts, 1)

    return jax.tree.map(whole, *halves, chosen)


def _at_halves(
    sequence: WholeSequence, turn: int, of_late: jax.Array, of_chosen: jax.Array
) -> jax.Array:
    """Gradients at the keys of a turn: late queries' at early keys, and the other block's."""
    before, nothing = _from_before(sequence, turn), jnp.zeros_like(of_late)
    early = of_late + jnp.where(before, of_chosen, nothing)
    return jnp.concatenate([early, jnp.where(before, nothing, of_chosen)], 1)


def _halves(tree: Any) -> tuple[Any, Any]:
    """Those of the early stretch and those of the late one, of all leaves `[B, L, ...]`."""
    early = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)
    return early, jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)
