"""Exact attention block by block, and its gradient, without storing scores.

The scores and probabilities of a block of queries and a block of keys exist only while that block
is computed. The outputs over several blocks of keys are merged by their log-sum-exp (Dao et al.
2022, section 3.1; Liu et al. 2023). The gradient recomputes a block's probabilities from its scores
and the log-sum-exp over all keys. Blocks of keys that no query attends to are skipped.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, K head dim; M = H / G * L
rows, the queries of all heads that read the same keys. Sums are float32, or wider if the queries
are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

# `checkpoint_name` of the residuals that F leaves for B; rematerialisation policies match it.
KEPT = "dot_product_attention_blocks"
_MOST_HALVINGS, _SHORTEST = 5, 128


class AttentionOutput(NamedTuple):
    """Attention output over the keys seen so far, and its log-sum-exp."""

    mixed_BLHK: jax.Array
    logsumexp_BLH: jax.Array

    def merge(self, more: "AttentionOutput") -> "AttentionOutput":
        """Merge with the output over other keys."""
        whole_BLH = jnp.logaddexp(self.logsumexp_BLH, more.logsumexp_BLH)
        parts = (
            part.mixed_BLHK * jnp.exp(part.logsumexp_BLH - whole_BLH)[..., None]
            for part in (self, more)
        )
        return AttentionOutput(sum(parts), whole_BLH)

    def with_sinks(self, sink_H: jax.Array) -> "AttentionOutput":
        """Merge with one more key per head, whose score is the head's sink and whose value is 0."""
        sink_BLH = sink_H.astype(self.logsumexp_BLH.dtype)[None, None]
        whole_BLH = jnp.logaddexp(self.logsumexp_BLH, sink_BLH)
        kept_BLH = jnp.exp(self.logsumexp_BLH - whole_BLH)
        return AttentionOutput(self.mixed_BLHK * kept_BLH[..., None], whole_BLH)

    def sink_gradients(self, sink_H: jax.Array, dmixed_BLHK: jax.Array) -> jax.Array:
        """Gradients of the sinks that this output contains, `[H]`: a score's, with a value of 0."""
        wide = self.logsumexp_BLH.dtype
        share_BLH = jnp.exp(sink_H.astype(wide)[None, None] - self.logsumexp_BLH)
        held_BLH = (self.mixed_BLHK.astype(wide) * dmixed_BLHK.astype(wide)).sum(-1)
        return -(share_BLH * held_BLH).sum((0, 1)).astype(sink_H.dtype)


class KeyRange(NamedTuple):
    """The keys that each query attends to: those at positions `first_BL` to `own_BL`, inclusive.

    Positions count in the full sequence. `first_BL` is None where neither a window nor documents
    limit attention: then a query attends to all keys up to its own position.
    """

    own_BL: jax.Array
    first_BL: jax.Array | None = None

    @classmethod
    def of(cls, place_L: Any, batch: int, window: int, position_BL: jax.Array | None) -> "KeyRange":
        """Build it from query positions, the window (0: none) and positions in the document."""
        own_BL = jnp.broadcast_to(jnp.asarray(place_L, jnp.int32), (batch, len(place_L)))
        back = [] if not window else [jnp.full_like(own_BL, window - 1)]
        back += [] if position_BL is None else [position_BL.astype(jnp.int32)]
        if not back:
            return cls(own_BL)
        return cls(own_BL, own_BL - (back[0] if len(back) == 1 else jnp.minimum(*back)))

    def mask(self, place_BS: jax.Array) -> jax.Array:
        """Which of the keys at positions `place_BS` each query attends to, `[B, 1, L, S]`."""
        place = place_BS[:, None]
        seen_BLS = place <= self.own_BL[..., None]
        if self.first_BL is not None:
            seen_BLS &= place >= self.first_BL[..., None]
        return seen_BLS[:, None]

    def ends_before(self, place_BS: jax.Array) -> jax.Array:
        """Whether every query's first key comes after all of the positions `place_BS`."""
        return self.first_BL.min() > place_BS.max()


class QueryBlock(NamedTuple):
    """Queries and their `key_range`; for a gradient also the output over all keys, and dy."""

    q_BLHK: jax.Array
    key_range: KeyRange
    made: AttentionOutput | None = None
    dmixed_BLHK: jax.Array | None = None


class KeyBlock(NamedTuple):
    """Keys, values and their positions in the full sequence."""

    k_BSGK: jax.Array
    v_BSGK: jax.Array
    place_BS: jax.Array


class BlockGradients(NamedTuple):
    """Gradients of queries, keys and values, in float32 or wider."""

    dq_BLHK: jax.Array
    dk_BSGK: jax.Array
    dv_BSGK: jax.Array


BlockOp = Callable[[QueryBlock, KeyBlock, jax.Array | None], Any]


class BlockKernel(Protocol):
    """A kernel that computes blocks.

    `causal` and `causal_gradients` take queries and keys of the same tokens. `attend_block` and
    `block_gradients` take the mask None where every query attends to all keys of the block.
    """

    attend_block: Callable[[QueryBlock, KeyBlock, jax.Array | None], AttentionOutput]
    block_gradients: Callable[[QueryBlock, KeyBlock, jax.Array | None], BlockGradients]
    causal: Callable[[QueryBlock, KeyBlock], AttentionOutput]
    causal_gradients: Callable[[QueryBlock, KeyBlock], BlockGradients]


def attend_block(
    queries: QueryBlock, keys: KeyBlock, mask_B1LS: jax.Array | None = None
) -> AttentionOutput:
    """Output of queries over a block of keys, where the mask is true; None: everywhere."""
    score_BGMS, (_, _, v_BGSK) = _scores(queries, keys, mask_B1LS)
    top_BGM1 = score_BGMS.max(-1, keepdims=True)
    share_BGMS = jnp.exp(score_BGMS - top_BGM1)
    total_BGM1 = share_BGMS.sum(-1, keepdims=True)
    mixed_BGMK = _product("bgms,bgsk->bgmk", share_BGMS.astype(v_BGSK.dtype), v_BGSK) / total_BGM1
    logsumexp_BGM1 = top_BGM1 + jnp.log(total_BGM1)
    length = queries.q_BLHK.shape[1]
    return AttentionOutput(
        _to_tokens(mixed_BGMK, length), _to_tokens(logsumexp_BGM1, length)[..., 0]
    )


def block_gradients(
    queries: QueryBlock, keys: KeyBlock, mask_B1LS: jax.Array | None = None
) -> BlockGradients:
    """A block's contribution to the gradients, for queries that have their output over all keys."""
    score_BGMS, (q_BGMK, k_BGSK, v_BGSK) = _scores(queries, keys, mask_B1LS)
    groups, output, dmixed_BLHK = keys.k_BSGK.shape[2], queries.made, queries.dmixed_BLHK
    rows = lambda x: _to_rows(x, groups)  # noqa: E731
    dmixed_BGMK, wide = rows(dmixed_BLHK).astype(q_BGMK.dtype), score_BGMS.dtype
    share_BGMS = jnp.exp(score_BGMS - rows(output.logsumexp_BLH[..., None]))
    held_BLH1 = (output.mixed_BLHK.astype(wide) * dmixed_BLHK.astype(wide)).sum(-1, keepdims=True)
    dshare_BGMS = _product("bgmk,bgsk->bgms", dmixed_BGMK, v_BGSK)
    dscore_BGMS = share_BGMS * (dshare_BGMS - rows(held_BLH1)) * q_BGMK.shape[-1] ** -0.5
    dscore_BGMS, share_BGMS = (x.astype(q_BGMK.dtype) for x in (dscore_BGMS, share_BGMS))
    dq_BGMK = _product("bgms,bgsk->bgmk", dscore_BGMS, k_BGSK)
    dk_BGSK = _product("bgms,bgmk->bgsk", dscore_BGMS, q_BGMK)
    dv_BGSK = _product("bgms,bgmk->bgsk", share_BGMS, dmixed_BGMK)
    length, (dk, dv) = dmixed_BLHK.shape[1], (x.transpose(0, 2, 1, 3) for x in (dk_BGSK, dv_BGSK))
    return BlockGradients(_to_tokens(dq_BGMK, length), dk, dv)


def skip_unseen(op: BlockOp, queries: QueryBlock, keys: KeyBlock) -> Any:
    """Apply `op` to a block of keys before the queries; skip it if no query attends to them."""
    key_range, place_BS = queries.key_range, keys.place_BS
    if key_range.first_BL is None:
        return op(queries, keys, None)
    seen = lambda: op(queries, keys, key_range.mask(place_BS))  # noqa: E731
    like = jax.eval_shape(seen)
    return lax.cond(key_range.ends_before(place_BS), lambda: _empty_result(like), seen)


def delay_residuals(residuals: Any, dmixed_BLHK: jax.Array) -> Any:
    """Return the residuals of F behind a barrier that makes them depend on the output's gradient.

    Without the barrier, what B recomputes from residuals alone would not depend on the gradient,
    and would be computed in F and stored.
    """
    return lax.optimization_barrier((residuals, dmixed_BLHK))[0]


def count_halvings(length: int) -> int:
    """How often causal attention is halved; each halving halves the wasted work.

    With n halvings a device computes 1 + 2^-n of the causal half. Blocks have 128 tokens or more.

    >>> [count_halvings(length) for length in (16, 256, 257, 4096, 65536)]
    [0, 1, 0, 5, 5]
    """
    count = 0
    while (
        count < _MOST_HALVINGS
        and not length % 2 ** (count + 1)
        and length >> (count + 1) >= _SHORTEST
    ):
        count += 1
    return count


@dataclass(frozen=True)
class PlainBlocks:
    """Blocks by plain matrix products.

    For queries and keys of the same tokens, the tokens are halved `depth` times. At each level the
    later half of the queries attends to all keys of the earlier half; the smallest blocks, on the
    diagonal, are masked. All blocks of one level are computed as one, with more examples.
    """

    depth: int
    attend_block = staticmethod(attend_block)
    block_gradients = staticmethod(block_gradients)

    def causal(self, queries: QueryBlock, keys: KeyBlock) -> AttentionOutput:
        """Output of queries over their own tokens."""
        own, batch = _split_blocks((queries, keys), 2**self.depth), queries.q_BLHK.shape[0]
        output = _join_blocks(attend_block(*own, own[0].key_range.mask(own[1].place_BS)), batch)
        for level in reversed(range(self.depth)):
            (_, later), (earlier, _) = (
                _split_halves(queries, 2**level),
                _split_halves(keys, 2**level),
            )
            before, after = _split_halves(output, 2**level)
            after = after.merge(skip_unseen(attend_block, later, earlier))
            output = _join_halves(before, after, batch)
        return output

    def causal_gradients(self, queries: QueryBlock, keys: KeyBlock) -> BlockGradients:
        """Gradients of attention over the queries' own tokens."""
        own, batch = _split_blocks((queries, keys), 2**self.depth), queries.q_BLHK.shape[0]
        joined = _join_blocks(block_gradients(*own, own[0].key_range.mask(own[1].place_BS)), batch)
        for level in reversed(range(self.depth)):
            (_, later), (earlier, _) = (
                _split_halves(queries, 2**level),
                _split_halves(keys, 2**level),
            )
            dq, dk, dv = skip_unseen(block_gradients, later, earlier)
            before, after = _split_halves(joined, 2**level)
            before = before._replace(dk_BSGK=before.dk_BSGK + dk, dv_BSGK=before.dv_BSGK + dv)
            joined = _join_halves(before, after._replace(dq_BLHK=after.dq_BLHK + dq), batch)
        return joined


def _scores(
    queries: QueryBlock, keys: KeyBlock, mask_B1LS: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Scores `[B, G, M, S]`, and queries, keys and values in the layout of the products.

    float16 inputs become float32, because XLA on CPU has no float16 products.
    """
    q_BLHK, k_BSGK, v_BSGK = queries.q_BLHK, keys.k_BSGK, keys.v_BSGK
    if q_BLHK.dtype == jnp.float16:
        q_BLHK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BLHK, k_BSGK, v_BSGK))
    q_BGMK = _to_rows(q_BLHK, k_BSGK.shape[2])
    k_BGSK, v_BGSK = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    score_BGMS = _product("bgmk,bgsk->bgms", q_BGMK, k_BGSK) * q_BGMK.shape[-1] ** -0.5
    if mask_B1LS is not None:
        b, g, _, keys_of = score_BGMS.shape
        score = score_BGMS.reshape(b, g, -1, q_BLHK.shape[1], keys_of)
        score = jnp.where(mask_B1LS[:, :, None], score, jnp.finfo(score.dtype).min)
        score_BGMS = score.reshape(score_BGMS.shape)
    return score_BGMS, (q_BGMK, k_BGSK, v_BGSK)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(form, left, right, preferred_element_type=wide)


def _to_rows(x_BLHK: jax.Array, groups: int) -> jax.Array:
    """`[B, L, H, K]` to `[B, G, M, K]`."""
    b, length, heads, width = x_BLHK.shape
    x_BLGRK = x_BLHK.reshape(b, length, groups, heads // groups, width)
    return x_BLGRK.transpose(0, 2, 3, 1, 4).reshape(b, groups, -1, width)


def _to_tokens(x_BGMK: jax.Array, length: int) -> jax.Array:
    """`[B, G, M, K]` to `[B, L, H, K]`."""
    b, groups, _, width = x_BGMK.shape
    x_BGRLK = x_BGMK.reshape(b, groups, -1, length, width)
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(b, length, -1, width)


def _split_blocks(tree: Any, parts: int) -> Any:
    """Split L of all leaves `[B, L, ...]` into `parts` blocks, each an example of its own."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * parts, -1, *x.shape[2:]), tree)


def _split_halves(tree: Any, parts: int) -> tuple[Any, Any]:
    """First and second half of each of `parts` blocks of L, as examples of their own."""
    cut = jax.tree.map(lambda x: x.reshape(x.shape[0] * parts, 2, -1, *x.shape[2:]), tree)
    return jax.tree.map(lambda x: x[:, 0], cut), jax.tree.map(lambda x: x[:, 1], cut)


def _join_halves(before: Any, after: Any, batch: int) -> Any:
    """Undo `_split_halves`."""
    both = jax.tree.map(lambda *halves: jnp.concatenate(halves, 1), before, after)
    return _join_blocks(both, batch)


def _join_blocks(tree: Any, batch: int) -> Any:
    """Undo `_split_blocks`."""
    return jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[2:]), tree)


def _empty_result(like: Any) -> Any:
    """Result of a skipped block: zeros, and the lowest finite value for the log-sum-exp."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    if isinstance(zeros, AttentionOutput):
        least = jnp.full_like(zeros.logsumexp_BLH, jnp.finfo(zeros.logsumexp_BLH.dtype).min)
        return zeros._replace(logsumexp_BLH=least)
    return zeros
