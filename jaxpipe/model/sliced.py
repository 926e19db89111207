"""Causal attention over the sequence so far, of which later keys are not computed with.

A sequence may come in slices: the keys and values of earlier ones are there whole, in blocks as
long as a slice, and a loop goes over as many as there are. F leaves queries, what they mix and the
log of the sum over all keys; keys and values are in the state that slices hand on.

Shapes are those of `jaxpipe.model.blocks`; S are the tokens of the whole sequence.
"""

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
    Queries,
    Sight,
    in_backward,
    of_seen,
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sliced_attention(
    tokens: int, blocks: Blocks, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
    sight: Sight, begin: jax.Array,
) -> jax.Array:  # fmt: skip
    """Attention of every token to those that it sees, `[B, L, H, K]`.

    They are tokens of the slice of so many `tokens` that begins at token `begin`; a device that has
    only some of them masks the slice's.
    """
    return _forward(tokens, blocks, q_BLHK, k_BSGK, v_BSGK, sight, begin)[0]


def _forward(
    tokens: int, blocks: Blocks, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
    sight: Sight, begin: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
    queries, slices = Queries(q_BLHK, sight), _Slices(tokens, k_BSGK, v_BSGK)
    own = slices.keys(begin)
    if q_BLHK.shape[1] == tokens:
        made = blocks.causal(queries, own)
    else:
        made = blocks.attended(queries, own, sight.mask(own.place_BS))

    def with_slice(index: jax.Array, made: Made) -> Made:
        return made.with_more(of_seen(blocks.attended, queries, slices.keys(index * tokens)))

    if k_BSGK.shape[1] > tokens:
        made = lax.fori_loop(*slices.before(begin, sight), with_slice, made)
    made = Made(made.mixed_BLHK.astype(q_BLHK.dtype), made.logsumexp_BLH)
    made = jax.tree.map(lambda x: checkpoint_name(x, KEPT), made)
    return made.mixed_BLHK, (q_BLHK, k_BSGK, v_BSGK, sight, begin, made)


def _backward(
    tokens: int, blocks: Blocks, kept: tuple[Any, ...], dmixed_BLHK: jax.Array
) -> tuple[Any, ...]:
    q_BLHK, k_BSGK, v_BSGK, sight, begin, made = in_backward(kept, dmixed_BLHK)
    queries = Queries(q_BLHK, sight, made, dmixed_BLHK)
    slices = _Slices(tokens, k_BSGK, v_BSGK)
    own = slices.keys(begin)
    if q_BLHK.shape[1] == tokens:
        of_own = blocks.causal_gradients(queries, own)
    else:
        of_own = blocks.gradients(queries, own, sight.mask(own.place_BS))
    nothing = jnp.zeros_like(k_BSGK), jnp.zeros_like(v_BSGK)
    found = Gradients(of_own.dq_BLHK, *slices.put(nothing, of_own[1:], begin))

    def with_slice(index: jax.Array, found: Gradients) -> Gradients:
        dq, *at_keys = of_seen(blocks.gradients, queries, slices.keys(index * tokens))
        return Gradients(found.dq_BLHK + dq, *slices.put(found[1:], at_keys, index * tokens))

    if k_BSGK.shape[1] > tokens:
        found = lax.fori_loop(*slices.before(begin, sight), with_slice, found)
    return *found._replace(dq_BLHK=found.dq_BLHK.astype(q_BLHK.dtype)), None, None


sliced_attention.defvjp(_forward, _backward)


class _Slices:
    """The keys and values of a sequence in slices of so many tokens."""

    def __init__(self, tokens: int, k_BSGK: jax.Array, v_BSGK: jax.Array):
        self.tokens, self.whole = tokens, (k_BSGK, v_BSGK)

    def keys(self, begin: jax.Array) -> Keys:
        """Those of the slice that begins there."""
        parts = (lax.dynamic_slice_in_dim(x, begin, self.tokens, axis=1) for x in self.whole)
        place_BS = begin + jnp.arange(self.tokens, dtype=jnp.int32)
        return Keys(*parts, jnp.broadcast_to(place_BS, (len(self.whole[0]), self.tokens)))

    def before(self, begin: jax.Array, sight: Sight) -> tuple[Any, Any]:
        """The first of the slices before it that any query sees, and the end of these."""
        first = 0 if sight.first_BL is None else jnp.maximum(sight.first_BL.min(), 0) // self.tokens
        return first, begin // self.tokens

    def put(self, at_whole: Any, at_slice: Any, begin: jax.Array) -> list[jax.Array]:
        """The gradients at all keys and values with those of a slice, which has none yet."""
        return [
            lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), begin, axis=1)
            for whole, part in zip(at_whole, at_slice)
        ]
