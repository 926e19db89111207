"""Linear recurrences over tokens, computed in chunks by dense products.

A head's state S `[K, V]` decays, takes up a value at each token's key, and is read by its query
(Mamba-2: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, section 6):

  S_t = a_t S_(t-1) + k_t v_t^T,    o_t = S_t^T q_t.

By the gated delta rule it is instead corrected where a token's key reads it (Yang et al. 2024,
"Gated Delta Networks", arXiv 2412.06464, equation 10):

  S_t = a_t S_(t-1) + k_t (b_t (v_t - (a_t S_(t-1))^T k_t))^T.

The factor a_t is a number, or a diagonal matrix `[K, K]` (Kimi delta attention: Kimi Team 2025,
"Kimi Linear", arXiv 2510.26692, section 3).

Each correction within a chunk of C tokens depends on those before it: they solve a triangular
system (the WY representation: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta
Rule", arXiv 2406.06484, section 3). Only the states at the ends of chunks follow from one another,
and all else is computed for all chunks at once. No array has the size `[L, L]`, or that of a state
for every token.

Shapes: B examples, L tokens, N chunks of C tokens, G key heads, R value heads for each of them, K
and V the widths of a key and of a value. States and sums are float32, or wider if inputs are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.model.recurrent.decays import ChannelDecays, HeadDecays

_ROWS = 8  # a block of so many rows of a triangular system is solved row by row


class Tokens(NamedTuple):
    """What the recurrence reads of L tokens.

    Attributes:
      q_BLGK, k_BLGK: queries, and keys; with a rate these have norm 1 or less.
      v_BLGRV: values.
      decay_BLGR: logarithms of the factors a, 0 or less; `[B, L, G, R, K]` where every channel of a
        key has its own.
      rate_BLGR: the factors b of the delta rule, from 0 to 1; None: states take up values as they
        are.
      starts_BL: whether the state is 0 before a token; None: it is before none.
    """

    q_BLGK: jax.Array
    k_BLGK: jax.Array
    v_BLGRV: jax.Array
    decay_BLGR: jax.Array
    rate_BLGR: jax.Array | None = None
    starts_BL: jax.Array | None = None


def linear_recurrence(
    tokens: Tokens, state_BGRKV: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs `[B, L, G, R, V]` in the dtype of values, and the state after L tokens.

    Its gradient reads tokens and state alone: the arrays of chunks, which are larger, it computes
    again.

    Args:
      tokens: what it reads of the tokens.
      state_BGRKV: the state before the first token, in the dtype of all sums.
      chunk: C, with a rate a power of two; L need not be a multiple. Results depend on it by
        rounding alone.
    """
    return jax.checkpoint(_in_chunks, static_argnums=2)(tokens, state_BGRKV, chunk)


def _in_chunks(tokens: Tokens, state_BGRKV: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    q, k, v, decay, rate, starts = tokens
    length, wide = k.shape[1], state_BGRKV.dtype
    size = min(chunk, 1 << (length - 1).bit_length())

    def split(x_BLGRX: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, -length % size), *[(0, 0)] * 3]  # tokens that change nothing
        b, _, g, r, width = x_BLGRX.shape
        x = jnp.pad(x_BLGRX, padding).reshape(b, -1, size, g, r, width)
        return x.transpose(1, 0, 3, 4, 2, 5)

    floats = (
        q[:, :, :, None], k[:, :, :, None], v,
        decay if decay.ndim == v.ndim else decay[..., None],
        None if rate is None else rate[..., None],
    )  # fmt: skip
    chunks = Tokens(
        *(x if x is None else split(x.astype(wide)) for x in floats),
        None if starts is None else split(starts[:, :, None, None, None].astype(jnp.int32)),
    )
    made, state_BGRKV = _run(chunks, state_BGRKV)
    made_BNCGRV = made.transpose(1, 0, 4, 2, 3, 5)
    made_BLGRV = made_BNCGRV.reshape(len(k), -1, *v.shape[2:])[:, :length]
    return made_BLGRV.astype(v.dtype), state_BGRKV


def _run(chunks: Tokens, state_BGRKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs `[N, B, G, R, C, V]` of all chunks, and the state after the last."""
    q, k, v, decay, rate, starts = chunks
    decays = (HeadDecays if decay.shape[-1] == 1 else ChannelDecays).of(decay, starts)
    scores = decays.scores(q, k)
    from_values, from_state = v, None
    if rate is not None:
        system = jnp.tril(decays.system(rate, k), -1)
        solved = unit_lower_inverse(system) * rate.mT
        from_values, from_state = solved @ v, decays.reads(solved, k)

    def step(state: jax.Array, of_chunk: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        values, reads, keys, leaves, passes = of_chunk
        taken_up = values if reads is None else values - reads @ state
        after = passes * state + keys.mT @ (taken_up if leaves is None else leaves * taken_up)
        return after, (state, taken_up)

    per_chunk = from_values, from_state, *decays.writes(k), decays.passes
    state_BGRKV, (before, taken_up) = lax.scan(step, state_BGRKV, per_chunk)
    return decays.outputs(q, before) + scores @ taken_up, state_BGRKV


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Return (1 + lower)^-1 of matrices `[..., C, C]` that are 0 on and above the diagonal.

    C is a power of two. Blocks of a few rows are solved row by row, and joined by products:
    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    size = lower.shape[-1]
    if size <= _ROWS:
        return _by_rows(lower)
    half = size // 2
    corner = lower[..., half:, :half]
    blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, last = unit_lower_inverse(blocks)
    above = jnp.concatenate([first, jnp.zeros_like(corner)], -1)
    below = jnp.concatenate([-last @ (corner @ first), last], -1)
    return jnp.concatenate([above, below], -2)


def _by_rows(lower: jax.Array) -> jax.Array:
    """The inverse by forward substitution."""
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    found = identity[..., :1, :]
    for i in range(1, lower.shape[-1]):
        row = identity[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ found
        found = jnp.concatenate([found, row], -2)
    return found


def _inverse_and_itself(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_gradient(inverse: jax.Array, dinverse: jax.Array) -> tuple[jax.Array]:
    return (jnp.tril(-inverse.mT @ dinverse @ inverse.mT, -1),)


unit_lower_inverse.defvjp(_inverse_and_itself, _inverse_gradient)
