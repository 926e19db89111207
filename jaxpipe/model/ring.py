"""Causal attention over a sequence that devices share: keys and values go round them in a ring.

Every device computes with the keys that are here while those of the device before it are on their
way (Liu et al. 2023, "Ring Attention"). Its queries are of two stretches, one early and one late,
so that in each turn it has two half blocks to make, whichever device the keys are of (the order is
known as zigzag). The gradient goes round once more, with the gradients at keys and values behind
these. F leaves queries, keys and values of its own tokens, what they mix, and the log of the sum
over all keys.

Shapes are those of `jaxpipe.model.blocks`; L are a device's tokens, half of them of each stretch.
"""

from collections.abc import Callable
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_attention(
    sequence: WholeSequence, blocks: Blocks, q_BLHK: jax.Array, k_BLGK: jax.Array,
    v_BLGK: jax.Array, sight: Sight,
) -> jax.Array:  # fmt: skip
    """Attention of every token to those that it sees of the whole sequence, `[B, L, H, K]`."""
    return _forward(sequence, blocks, q_BLHK, k_BLGK, v_BLGK, sight)[0]


def _forward(
    sequence: WholeSequence, blocks: Blocks, q_BLHK: jax.Array, k_BLGK: jax.Array,
    v_BLGK: jax.Array, sight: Sight,
) -> tuple[jax.Array, Any]:  # fmt: skip
    queries, keys = Queries(q_BLHK, sight), Keys(k_BLGK, v_BLGK, sight.own_BL)

    def with_turn(turn: int, there: Keys, made: Made | None) -> Made:
        if not turn:
            return blocks.causal(queries, there)
        late, which = _late_and_chosen(sequence, turn, blocks.attended, queries, there)
        early_made, late_made = _halves(made)
        late_made = late_made.with_more(late)
        chosen = _chosen(sequence, turn, early_made, late_made).with_more(which)
        return _put_back(sequence, turn, (early_made, late_made), chosen)

    made = _around(sequence, keys, with_turn)
    made = Made(made.mixed_BLHK.astype(q_BLHK.dtype), made.logsumexp_BLH)
    made = jax.tree.map(lambda x: checkpoint_name(x, KEPT), made)
    return made.mixed_BLHK, (q_BLHK, k_BLGK, v_BLGK, sight, made)


def _backward(
    sequence: WholeSequence, blocks: Blocks, kept: tuple[Any, ...], dmixed_BLHK: jax.Array
) -> tuple[Any, ...]:
    q_BLHK, k_BLGK, v_BLGK, sight, made = in_backward(kept, dmixed_BLHK)
    queries = Queries(q_BLHK, sight, made, dmixed_BLHK)

    def with_turn(turn: int, there: Keys, found: Gradients | None) -> Gradients:
        """Beside those at queries, those at the keys that are here, of the devices before."""
        if not turn:
            return blocks.causal_gradients(queries, there)
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

    keys = Keys(k_BLGK, v_BLGK, sight.own_BL)
    dq, *at_keys = _around(sequence, keys, with_turn)
    dk, dv = sequence.turned(at_keys)
    found = Gradients(dq, dk, dv)
    return *(d.astype(x.dtype) for d, x in zip(found, (q_BLHK, k_BLGK, v_BLGK))), None


ring_attention.defvjp(_forward, _backward)


def _around(sequence: WholeSequence, keys: Keys, with_turn: Callable[[int, Keys, Any], Any]) -> Any:
    """What is made of own keys, and of those of the device so many turns before, one by one.

    The next keys are on their way meanwhile, and no others: those after them set out when a turn's
    blocks are made, or else a scheduler could have all of them come at once, behind nothing.
    """
    made = None
    for turn in range(sequence.size - 1):
        coming = sequence.turned(keys)
        made, keys = lax.optimization_barrier((with_turn(turn, keys, made), coming))
    return with_turn(sequence.size - 1, keys, made)


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
