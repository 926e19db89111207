"""Attention of every query to the few keys that an indexer scores highest, in blocks of queries.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1. The index score of query t and key s is

    I_ts = sum over index heads i of w_ti relu(q_ti k_s / sqrt(E)),

and query t attends to the X keys of the highest scores among those that it may see. The indexer
learns to score keys as attention weighs them: its loss is the sum over queries of KL(p_t || softmax
I_t) over these keys, where p_t is the mean of the heads' probabilities. Nothing but the indexer
learns from this loss, and the choice has no gradient.

Arrays that have both queries and keys exist for one block of queries at a time, in F and in B.

Shapes: B examples, L queries, C queries of a block, S keys, X chosen keys, H heads of a device, G
key/value heads, R = H / G, K the width of a key, V that of a value, I heads of the indexer, E their
width. Scores, probabilities and sums are float32, or wider if the queries are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.model.attention.blocks import KEPT, KeyRange, delay_residuals
from jaxpipe.model.attention.case import AttentionCase, indexed_supports
from jaxpipe.model.attention.keys import Arrays, Cache, Keys, Make
from jaxpipe.model.attention.ring import slice_positions
from jaxpipe.model.layers.parts import LayerInputs

CHOSEN = "chosen_keys"  # checkpoint name of the chosen indices, which F always stores
_MOST = 2**27  # elements of the largest array of a block
_LONGEST = 256  # queries of a block

# Maps queries, or the mixed values, of all heads and weights; `[B, C, H, ...]` both.
Map = Callable[[jax.Array, jax.Array], jax.Array]


class IndexQueries(NamedTuple):
    """The indexer's queries `[B, L, I, E]`, and the weights of its heads `[B, L, I]`."""

    q_BLIE: jax.Array
    weight_BLI: jax.Array


class _Limits(NamedTuple):
    """The keys of each query: those in its range, or of these the chosen ones; -1 is no key."""

    key_range: KeyRange
    chosen_BLX: jax.Array | None = None


@dataclass(frozen=True)
class IndexedAttention:
    """Attention to the keys that an indexer chooses, as a layer calls it.

    The last of `Keys.parts` are the indexer's keys `[B, L, 1, E]`; `make` makes keys and values of
    the others. Without an indexer, all are of attention, whose keys an earlier layer has chosen.
    Devices that share the layer have their own heads, and all of the indexer.

    Attributes:
      topk: X, the number of keys that a query attends to. 0: all that it may see, and nothing but
        the indexer has gradients.
      make: makes keys and values of the parts of attention's keys, for any tokens.
      enter: makes queries of those that are given.
      leave: makes values of those that attention mixed.
      has_loss: whether the indexer's loss is computed.
      sequence: how attention reaches the tokens on other devices.
      devices: the devices that share the heads.
    """

    topk: int
    make: Make
    enter: Map
    leave: Map
    has_loss: bool = True
    sequence: FullSequence = FULL_SEQUENCE
    devices: OneDevice = ONE_DEVICE

    def __call__(
        self, q_BLHK: jax.Array, index: IndexQueries | None, parts: Arrays, weights: jax.Array,
        given: LayerInputs, chosen_BLX: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, Cache | None]:  # fmt: skip
        """Return output `[B, L, H, V]`, losses `[B, L]`, chosen keys, and with slices the cache.

        Args:
          q_BLHK: queries of the L tokens of this device's sequence shard, or of its slice.
          index: the indexer's of the same tokens; None: there is no indexer.
          parts: of the keys of the same tokens.
          weights: the second argument of `enter` and `leave`.
          given: the cache of earlier slices, and the documents of packed rows.
          chosen_BLX: the keys that an earlier layer chose, `[B, L, X]`, without an indexer.

        Raises:
          ValueError: keys of other devices go round a ring, or heads are exchanged.
        """
        cache, _, documents, _ = given
        case = AttentionCase(
            self.sequence, slices=cache is not None, dropout=given.masks.dropout.shares
        )
        if unmet := indexed_supports(case):
            raise ValueError(unmet)
        keys, cache = Keys(parts).reach(case, cache)
        batch, length = q_BLHK.shape[:2]
        place_L = slice_positions(self.sequence, length) + (0 if cache is None else cache.begin)
        positions_BL = None if documents is None else documents.positions
        limits = _Limits(KeyRange.of(place_L, batch, 0, positions_BL))
        if self.topk and index is not None:
            chosen_BLX = choose_keys(index, keys.parts[-1][:, :, 0], limits.key_range, self.topk)
            chosen_BLX = checkpoint_name(chosen_BLX, CHOSEN)
        limits = limits._replace(chosen_BLX=chosen_BLX)
        mixed_BLHV, loss_BL = _attend(self, (q_BLHK, index), keys.parts, weights, limits)
        return mixed_BLHV, loss_BL, chosen_BLX, cache

    def block(self, queries: Any, parts: Arrays, weights: jax.Array, limits: _Limits) -> Arrays:
        """Output `[B, C, H, V]` and losses `[B, C]` of a block of queries.

        `parts` have the chosen keys of each query, `[B, C, X, ...]`, or keys of all, `[B, S, ...]`.
        """
        (q_BCHK, index), places = queries, "bx" if limits.chosen_BLX is None else "bcx"
        if limits.chosen_BLX is None:
            place_BS = jnp.arange(parts[0].shape[1], dtype=jnp.int32)[None]
            seen_BCX = limits.key_range.mask(place_BS)[:, 0]
        else:
            seen_BCX = limits.chosen_BLX >= 0
        of_keys, index_k = _split(parts, index)
        k, v = self.make(*of_keys)
        q_BCHK = self.enter(q_BCHK, weights)
        b, c, heads, width = q_BCHK.shape
        q_BCGRK = q_BCHK.reshape(b, c, k.shape[-2], -1, width)
        score_BCGRX = _product(f"bcgrk,{places}gk->bcgrx", q_BCGRK, k) * width**-0.5
        score_BCGRX = _masked(score_BCGRX, seen_BCX[:, :, None, None])
        share_BCGRX = jax.nn.softmax(score_BCGRX, axis=-1)
        mixed = _product(f"bcgrx,{places}gv->bcgrv", share_BCGRX.astype(v.dtype), v)
        mixed_BCHV = self.leave(mixed.reshape(b, c, heads, -1).astype(q_BCHK.dtype), weights)
        if not self.has_loss:
            return mixed_BCHV, jnp.zeros((b, c), share_BCGRX.dtype)
        target_BCX = lax.stop_gradient(share_BCGRX).sum((2, 3)) / (heads * self.devices.size)
        target_BCX = self.devices.total(target_BCX)
        own_BCX = _masked(_index_scores(index, index_k[0][..., 0, :], places), seen_BCX)
        cross_BC = (target_BCX * jax.nn.log_softmax(own_BCX, axis=-1)).sum(-1)
        return mixed_BCHV, -jax.scipy.special.entr(target_BCX).sum(-1) - cross_BC

    def length(self, queries: Any, parts: Arrays) -> int:
        """Number of queries of a block, which divides L."""
        (batch, length, heads, _), keys = queries[0].shape, parts[0].shape[1]
        index_heads = 0 if queries[1] is None else queries[1].q_BLIE.shape[2]
        each = max(heads, index_heads) * (min(self.topk, keys) or keys)
        if self.topk:
            each = max(each, self.topk * sum(x.shape[-2] * x.shape[-1] for x in parts))
        return _block_length(length, batch * each)


def choose_keys(
    index: IndexQueries, k_BSE: jax.Array, key_range: KeyRange, topk: int,
    place_BS: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Indices of the keys of the highest index scores, `[B, L, min(topk, S)]` int32, best first.

    Of equal scores the earlier key comes first. Where a query may see fewer keys, the rest is -1.
    `place_BS` are the keys' positions in the sequence; None: they are one for every token.
    """
    index, k_BSE = lax.stop_gradient((index, k_BSE))
    if place_BS is None:
        place_BS = jnp.arange(k_BSE.shape[1], dtype=jnp.int32)[None]
    batch, length, heads, _ = index.q_BLIE.shape

    def of_block(block: tuple[IndexQueries, KeyRange]) -> jax.Array:
        index, key_range = block
        score_BCS = _index_scores(index, k_BSE, "bx")
        score_BCS = jnp.where(key_range.mask(place_BS)[:, 0], score_BCS, -jnp.inf)
        best_BCX, chosen_BCX = lax.top_k(score_BCS, min(topk, k_BSE.shape[1]))
        return jnp.where(best_BCX > -jnp.inf, chosen_BCX, -1)

    size = _block_length(length, batch * heads * k_BSE.shape[1])
    return _joined(lax.map(of_block, _blocks((index, key_range), size)))


def _index_scores(index: IndexQueries, k: jax.Array, places: str) -> jax.Array:
    """Index scores `[B, C, X]` of keys `[B, S, E]`, or of each query's own `[B, C, X, E]`."""
    each_BCIX = _product(f"bcie,{places}e->bcix", index.q_BLIE, k) * k.shape[-1] ** -0.5
    weight_BCI = index.weight_BLI.astype(each_BCIX.dtype)
    return jnp.einsum("bcix,bci->bcx", jax.nn.relu(each_BCIX), weight_BCI)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    attention: IndexedAttention, queries: Any, parts: Arrays, weights: jax.Array, limits: _Limits
) -> tuple[jax.Array, jax.Array]:
    """Attention output `[B, L, H, V]` and losses `[B, L]`, one block of queries after the other."""
    return _forward(attention, queries, parts, weights, limits)[0]


def _forward(
    attention: IndexedAttention, queries: Any, parts: Arrays, weights: jax.Array, limits: _Limits
) -> tuple[Arrays, Any]:
    def of_block(block: Any) -> Arrays:
        queries, limits = block
        return attention.block(queries, _chosen(parts, limits), weights, limits)

    size = attention.length(queries, parts)
    made = _joined(lax.map(of_block, _blocks((queries, limits), size)))
    mixed_BLHV, loss_BL = (checkpoint_name(x, KEPT) for x in made)
    return (mixed_BLHV, loss_BL), (queries, parts, weights, limits)


def _backward(attention: IndexedAttention, saved: Any, gradients: Arrays) -> tuple[Any, ...]:
    queries, parts, weights, limits = delay_residuals(saved, gradients[0])

    def of_block(sums: Any, block: Any) -> tuple[Any, Any]:
        queries, limits, dy = block

        def forward(queries: Any, parts: Arrays, weights: jax.Array) -> Arrays:
            if not attention.topk:
                of_keys, index_k = _split(parts, queries[1])
                fixed = queries[0], of_keys, weights
                q_BCHK, of_keys, weights = lax.stop_gradient(fixed)
                queries, parts = (q_BCHK, queries[1]), of_keys + index_k
            return attention.block(queries, parts, weights, limits)

        _, pull = jax.vjp(forward, queries, _chosen(parts, limits), weights)
        dqueries, dparts, dweights = pull(dy)
        at_parts, at_weights = sums
        at_parts = tuple(_add_chosen(*pair, limits) for pair in zip(at_parts, dparts))
        return (at_parts, at_weights + dweights), dqueries

    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
    blocks = _blocks((queries, limits, gradients), attention.length(queries, parts))
    sums, dqueries = lax.scan(of_block, (tuple(map(wide, parts)), wide(weights)), blocks)
    # Complete in B: W would need the gradients at queries and keys of all blocks.
    at_parts, at_weights = lax.optimization_barrier(sums)
    dparts = tuple(dx.astype(x.dtype) for dx, x in zip(at_parts, parts))
    return _joined(dqueries), dparts, at_weights.astype(weights.dtype), None


_attend.defvjp(_forward, _backward)


def _split(parts: Arrays, index: IndexQueries | None) -> tuple[Arrays, Arrays]:
    """The parts of attention's keys, and the keys of the indexer, if there is one."""
    count = len(parts) - (index is not None)
    return parts[:count], parts[count:]


def _chosen(parts: Arrays, limits: _Limits) -> Arrays:
    """The keys that each query of a block attends to, `[B, C, X, ...]`; those of all queries."""
    if limits.chosen_BLX is None:
        return parts
    example_B11 = jnp.arange(len(parts[0]))[:, None, None]
    return tuple(x[example_B11, jnp.maximum(limits.chosen_BLX, 0)] for x in parts)


def _add_chosen(total_BSGK: jax.Array, dx: jax.Array, limits: _Limits) -> jax.Array:
    """Add the gradients at what `_chosen` returned; where a query has no key they are zeros."""
    dx = dx.astype(total_BSGK.dtype)
    if limits.chosen_BLX is None:
        return total_BSGK + dx
    example_B11 = jnp.arange(len(dx))[:, None, None]
    return total_BSGK.at[example_B11, jnp.maximum(limits.chosen_BLX, 0)].add(dx)


def _masked(score: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, score, jnp.finfo(score.dtype).min)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(form, left, right, preferred_element_type=wide)


def _block_length(length: int, each: int) -> int:
    """The largest divisor of a length whose queries, of `each` elements, fit into a block.

    >>> _block_length(4096, 2**20), _block_length(24, 2**25), _block_length(7, 2**28)
    (128, 4, 1)
    """
    most = max(min(_LONGEST, _MOST // each), 1)
    return max(size for size in range(1, most + 1) if length % size == 0)


def _blocks(tree: Any, size: int) -> Any:
    """All leaves `[B, L, ...]` as `[L / size, B, size, ...]`."""

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(blocks, tree)


def _joined(tree: Any) -> Any:
    """Undo `_blocks`."""

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    return jax.tree.map(joined, tree)
