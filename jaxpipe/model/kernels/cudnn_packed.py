"""cuDNN's fused attention within the documents of packed rows, by its packed form.

cuDNN takes each document as a sequence of its own, given by its first token and its length (cuDNN's
"ragged offsets", which are computed here), so there is neither a mask nor a bias.

Shapes are those of `jaxpipe.model.attention.causal`, with at most N documents per row. Operands:
`q [B, L, H, K]`, a sequence shard that starts at token `begin`; keys and values `[B, S, G, K]` of
the full sequence; `first` and `length`, `[B, N]`, from `shard_documents`. Results: the output, and
the log-sum-exp of every query, `[B, H, L]`. The primitives can be traced anywhere; only GPUs run
them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jaxpipe.core.jax_internals import cudnn_attention
from jaxpipe.model.attention.blocks import AttentionOutput
from jaxpipe.model.attention.case import cudnn_takes_packed
from jaxpipe.model.kernels.cudnn import define_attention


class RowDocuments(NamedTuple):
    """The documents that a row's tokens belong to, `[B, L]` each.

    Attributes:
      segments: number of each token's document in the row, from 0 in token order; -1 is padding at
        the end of the row.
      positions: number of each token in its document, from 0.
    """

    segments: jax.Array
    positions: jax.Array


def shard_documents(documents: RowDocuments, begin: Any, most: int) -> tuple[jax.Array, jax.Array]:
    """First token and length of the documents in a sequence shard, `[B, most]` int32.

    The shard starts at token `begin` of the sequence. A document that starts before the shard
    counts from its own first token, and every document ends with the shard at the latest. Padding
    extends the last document; a shard of padding alone is one document. Missing documents have
    length 0.

    >>> row = RowDocuments(jnp.array([[4, 4, 5, -1]]), jnp.array([[2, 3, 0, 0]]))
    >>> [found.tolist() for found in shard_documents(row, 8, most=3)]
    [[[6, 10, 12]], [[4, 2, 0]]]
    """
    segments_BL, positions_BL = documents
    number_BL = jnp.where(segments_BL < 0, segments_BL.max(axis=1, keepdims=True), segments_BL)
    number_BL -= number_BL[:, :1]
    own_BN = (number_BL[:, None] == jnp.arange(most)[None, :, None]).sum(axis=2)
    first_BN = begin + own_BN.cumsum(axis=1) - own_BN
    before_B = jnp.where(segments_BL[:, 0] < 0, 0, positions_BL[:, 0])
    first_BN, own_BN = first_BN.at[:, 0].add(-before_B), own_BN.at[:, 0].add(before_B)
    return first_BN.astype(jnp.int32), own_BN.astype(jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, length: jax.Array,
    begin: jax.Array, window: int, sink_H: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of every token to its document's tokens up to itself, in the window if not 0.

    Each also attends to the sink of its head (`AttentionOutput.with_sinks`), if there are sinks.
    """
    return _forward(q, k, v, first, length, begin, window, sink_H)[0]


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    *operands, window, sink_H = operands
    mixed, logsumexp = _FORWARD.bind(*operands, window=window)
    output = AttentionOutput(mixed, logsumexp.swapaxes(1, 2))
    if sink_H is not None:
        output = output.with_sinks(sink_H)
        output = output._replace(mixed_BLHK=output.mixed_BLHK.astype(mixed.dtype))
    return output.mixed_BLHK, (operands, output, sink_H)


def _backward(window: int, residuals: tuple[Any, ...], dmixed: jax.Array) -> tuple[Any, ...]:
    operands, output, sink_H = residuals
    after = output.logsumexp_BLH.swapaxes(1, 2), output.mixed_BLHK, dmixed
    gradients = _BACKWARD.bind(*operands, *after, window=window)
    dsink_H = None if sink_H is None else output.sink_gradients(sink_H, dmixed)
    return *gradients, None, None, None, dsink_H


packed_attention.defvjp(_forward, _backward)


class _PackedLayout(NamedTuple):
    """Where cuDNN's packed form finds the tokens and documents of one call.

    A sequence shard is placed in a row as long as the full sequence, so that a document's queries
    and keys have the same positions. Rows follow one another, and so do the N sequences of each
    row.
    """

    first_BN: jax.Array
    length_BN: jax.Array
    begin: jax.Array
    queries: int
    tokens: int

    def placed(self, own_BLHK: jax.Array) -> jax.Array:
        """The shard at its place in a row of S tokens, zeros elsewhere."""
        if self.queries == self.tokens:
            return own_BLHK
        wide = jnp.zeros((own_BLHK.shape[0], self.tokens, *own_BLHK.shape[2:]), own_BLHK.dtype)
        return lax.dynamic_update_slice_in_dim(wide, own_BLHK, self.begin, axis=1)

    def own(self, x_BSHK: jax.Array) -> jax.Array:
        """The shard, sliced out of a row of S tokens."""
        return lax.dynamic_slice_in_dim(x_BSHK, self.begin, self.queries, axis=1)

    def seen(self, x_BSGK: jax.Array) -> jax.Array:
        """x with zeros at tokens of no document in this shard, where cuDNN writes nothing."""
        if self.queries == self.tokens:
            return x_BSGK
        token_1S, end = jnp.arange(self.tokens)[None], self.begin + self.queries
        seen_BS = (token_1S >= self.first_BN[:, :1]) & (token_1S < end)
        return jnp.where(seen_BS[..., None, None], x_BSGK, 0)

    def offsets(self, heads: int, width: int) -> jax.Array:
        """Start of each sequence, in elements of an array `[B, S, heads, width]`."""
        examples, most = self.first_BN.shape
        row_B1 = self.tokens * jnp.arange(examples, dtype=jnp.int32)[:, None]
        first = jnp.minimum(self.first_BN, self.tokens) + row_B1
        # jax's shape has an end offset in every row; cuDNN reads the first B * N + 1 offsets.
        first = jnp.pad(first.ravel(), (0, examples), constant_values=examples * self.tokens)
        return (first * (heads * width)).reshape(examples, most + 1)

    def places(self, heads: int) -> tuple[jax.Array, ...]:
        """Indices of every query in cuDNN's log-sum-exp: sequence, head, place in the sequence."""
        examples, most = self.first_BN.shape
        token_L = self.begin + jnp.arange(self.queries)
        end_BN1 = (self.first_BN + self.length_BN)[..., None]
        number_BL = (token_L[None, None] >= end_BN1).sum(axis=1)
        place_BL = token_L[None] - jnp.take_along_axis(self.first_BN, number_BL, axis=1)
        sequence_BL = number_BL + most * jnp.arange(examples)[:, None]
        return sequence_BL[:, None], jnp.arange(heads)[None, :, None], place_BL[:, None]

    def by_sequence(self, x_BHL: jax.Array) -> jax.Array:
        """x where cuDNN's log-sum-exp has it, `[B * N, H, S]`, and zeros elsewhere.

        It is gathered, because the zeros for a scatter depend on nothing: XLA would write those of
        all layers before the first layer runs.
        """
        token_BNS = self.first_BN[..., None] + jnp.arange(self.tokens)[None, None]
        end_BN1 = (self.first_BN + self.length_BN)[..., None]
        own_BNS = token_BNS - self.begin
        known_BNS = (token_BNS < end_BN1) & (own_BNS >= 0)  # documents end with the shard
        read = jax.vmap(lambda x_HL, own_NS: x_HL.at[:, own_NS].get(mode="clip"))
        x_BNHS = jnp.where(known_BNS[:, None], read(x_BHL, own_BNS), 0).swapaxes(1, 2)
        return x_BNHS.reshape(-1, *x_BNHS.shape[2:])


def _lower_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, length: jax.Array,
    begin: jax.Array, *, window: int,
) -> list[jax.Array]:  # fmt: skip
    """cuDNN's log-sum-exp is `[B * N, H, S]`; a query's value is that of its own sequence."""
    packing = _PackedLayout(first, length, begin, q.shape[1], k.shape[1])
    q = packing.placed(q)
    primitive, how = _cudnn_primitive("fwd", q, window)
    operands = _operands(packing, q, k, v)
    mixed, logsumexp = primitive.bind(*operands, **how, is_training=True)
    return [packing.own(mixed), logsumexp[packing.places(q.shape[2])]]


def _lower_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, length: jax.Array,
    begin: jax.Array, logsumexp: jax.Array, mixed: jax.Array, dmixed: jax.Array, *, window: int,
) -> list[jax.Array]:  # fmt: skip
    packing = _PackedLayout(first, length, begin, q.shape[1], k.shape[1])
    q = packing.placed(q)
    primitive, how = _cudnn_primitive("bwd", q, window)
    operands = _operands(packing, q, k, v)
    after = packing.by_sequence(logsumexp), packing.placed(mixed), packing.placed(dmixed)
    dq, dk, dv = primitive.bind(*operands, *after, **how)
    return [packing.own(dq), packing.seen(dk), packing.seen(dv)]


def _operands(packing: _PackedLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, ...]:
    """Operands of cuDNN's calls, in the order of jax's primitives."""
    unused, length = jnp.zeros(0, q.dtype), packing.length_BN
    offsets = packing.offsets(*q.shape[2:]), packing.offsets(*k.shape[2:])
    return q, k, v, unused, length, length, *offsets, unused, unused


def _cudnn_primitive(name: str, q: jax.Array, window: int) -> tuple[Primitive, dict[str, Any]]:
    """The call for queries `[B, S, H, K]`; raises `ValueError` where cuDNN has none for them."""
    if unmet := cudnn_takes_packed(q.shape, q.dtype.name):
        raise ValueError(unmet)
    return cudnn_attention(name, q.shape[-1], "PADDING_CAUSAL", window)


_FORWARD, _BACKWARD = define_attention("packed", _lower_forward, _lower_backward)
