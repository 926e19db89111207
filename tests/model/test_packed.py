"""Attention within documents: the plain kernel, and the fused one without cuDNN itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ragged

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.model.attention.causal import CausalAttention
from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.attention.plain import causal_attention
from jaxpipe.model.kernels.cudnn_packed import RowDocuments, _PackedLayout, shard_documents
from jaxpipe.model.layers.dropout import Dropout, Masks
from jaxpipe.model.layers.parts import LayerInputs

ROWS = ((7, 2, 3), (12,), (1, 4, 5, 1), ())  # document lengths in rows of 12; the rest is padding


def documents(rows=ROWS, length=12):
    segments = np.full((len(rows), length), -1, np.int32)
    positions = np.zeros_like(segments)
    for row, lengths in enumerate(rows):
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        segments[row, : sum(lengths)] = numbers
        for number in range(len(lengths)):
            positions[row, segments[row] == number] = np.arange(lengths[number])
    return RowDocuments(jnp.array(segments), jnp.array(positions))


def arguments(rows=ROWS, length=12):
    shapes = [(len(rows), length, heads, 8) for heads in (4, 2, 2)]
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def reference(q, k, v, window=0, rows=ROWS):
    """Reference attention, document by document; zero for padding."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    mixed = jnp.zeros_like(q)
    for row, lengths in enumerate(rows):
        end = 0
        for length in lengths:
            begin, end = end, end + length
            seen = jnp.tri(length, dtype=bool)
            seen &= ~jnp.tri(length, k=-window, dtype=bool) if window else True
            own = [a[row, begin:end] for a in (q, k, v)]
            score = jnp.einsum("lhk,shk->hls", *own[:2]) * 8**-0.5
            share = jax.nn.softmax(score, axis=-1, where=seen)
            mixed = mixed.at[row, begin:end].set(jnp.einsum("hls,shk->lhk", share, own[2]))
    return mixed


def values_and_gradients(attention, given, documents):
    """Return attention and its gradients of a loss that ignores padding."""

    def loss(given):
        mixed = attention(*given)
        mixed = jnp.where((documents.segments >= 0)[..., None, None], mixed, 0)
        weights = jnp.sin(jnp.arange(mixed.size, dtype=mixed.dtype)).reshape(mixed.shape)
        return jnp.sum(weights * mixed), mixed

    (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return [mixed, *gradients]


def equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert jnp.abs(a - b).max() <= 1e-13 * jnp.abs(b).max()


@pytest.mark.parametrize("window", [0, 3])
def test_the_plain_kernel_is_each_document_alone(window):
    with jax.enable_x64(True):
        given, of = arguments(), documents()
        attend, inputs = CausalAttention(window=window, documents=4), LayerInputs(documents=of)
        plain = lambda q, k, v: attend(q, Keys((k, v)), inputs)[0]  # noqa: E731
        wanted = values_and_gradients(partial(reference, window=window), given, of)
        equal(values_and_gradients(plain, given, of), wanted)


def test_blocks_of_queries_keep_documents_apart():
    rows = ((100, 156), (256,), (127, 1, 1, 120))
    with jax.enable_x64(True):
        given, of = arguments(rows, 256), documents(rows, 256)
        plain = partial(causal_attention, position_BL=of.positions)
        wanted = values_and_gradients(partial(reference, rows=rows), given, of)
        equal(values_and_gradients(plain, given, of), wanted)


def test_another_documents_values_have_no_gradient_at_all():
    """Exactly zero: before or after the document, in one block of queries or two."""
    rows = ((100, 100, 50),)
    given, of = arguments(rows, 256), documents(rows, 256)
    own = (of.segments == 1)[..., None, None]

    def loss(given):
        return jnp.sum(jnp.where(own, causal_attention(*given, position_BL=of.positions), 0) ** 2)

    for gradient in jax.jit(jax.grad(loss))(given):
        assert jnp.all(jnp.where(own, 0, gradient) == 0)
        assert jnp.all(jnp.abs(gradient).max(axis=(2, 3))[0, 101:200] > 0)  # q at 100: none


def fused(q, k, v, of, window=0, parts=1):
    """Run the fused kernel on the full row, or slice by slice in order."""
    attend, own = CausalAttention(kernel="cudnn", window=window, documents=4), q.shape[1] // parts
    past = Cache((jnp.full_like(k, 7), jnp.full_like(v, 7)), 0) if parts > 1 else None
    mixed = []
    for begin in range(0, q.shape[1], own):
        part = slice(begin, begin + own)
        documents = RowDocuments(*(leaf[:, part] for leaf in of))
        past = past and past._replace(begin=jnp.int32(begin))
        keys = Keys((k[:, part], v[:, part]))
        y, past = attend(q[:, part], keys, LayerInputs(past, documents=documents))
        mixed.append(y)
    return jnp.concatenate(mixed, axis=1)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 3])
def test_the_fused_kernel_is_each_document_alone(window, parts, monkeypatch):
    """On full rows and slices, all but cuDNN itself: the offsets and lengths that it gets.

    Rows that cuDNN leaves unwritten are NaN here. Gradients of padding are zero.
    """
    ragged.stands_in(monkeypatch)
    with jax.enable_x64(True):
        given, of = arguments(), documents()
        wanted = values_and_gradients(partial(reference, window=window), given, of)
        found = values_and_gradients(partial(fused, of=of, window=window, parts=parts), given, of)
        equal(found, wanted)


def test_shares_are_dropped_within_documents():
    """The dropout mask is the row's own, by position of query and key in the row."""
    with jax.enable_x64(True):
        (q, k, v), of = arguments(), documents()
        place = jnp.arange(12)
        masks = Masks.of(Dropout(0, 0.4), jnp.arange(len(ROWS)), 2, place, ONE_DEVICE)
        back = place[:, None] - place[None]
        seen = (of.segments[:, :, None] == of.segments[:, None]) & (back >= 0)[None]
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        score = jnp.einsum("blhk,bshk->bhls", q, k) * 8**-0.5
        share = masks.shares(jax.nn.softmax(score, axis=-1, where=seen[:, None]))
        wanted = jnp.einsum("bhls,bshk->blhk", share, v)
        found, _ = CausalAttention()(q, Keys((k, v)), LayerInputs(masks=masks, documents=of))
        real = of.segments >= 0
        equal([found[real]], [wanted[real]])


def test_documents_of_a_part():
    """A document that starts before the shard, full ones, one that ends after it, and padding."""
    of = documents(((3, 4, 5), (2, 2, 3), (12,), (4,)))
    part = RowDocuments(*(leaf[:, 4:8] for leaf in of))
    first, length = shard_documents(part, 4, most=2)
    assert first.tolist() == [[3, 7], [4, 8], [0, 8], [4, 8]]
    assert length.tolist() == [[4, 1], [4, 0], [8, 0], [4, 0]]


@pytest.mark.parametrize(("begin", "queries"), [(0, 12), (4, 4)])
def test_cudnn_finds_every_query_where_it_left_it(begin, queries):
    """Its backward pass is given the values that places of the forward pass have, else zeros."""
    of = RowDocuments(*(leaf[:, begin : begin + queries] for leaf in documents()))
    layout = _PackedLayout(*shard_documents(of, begin, most=5), begin, queries, 12)
    values = jax.random.normal(jax.random.key(0), (len(ROWS), 2, queries))
    wanted = jnp.zeros((len(ROWS) * 5, 2, 12)).at[layout.places(2)].set(values)
    np.testing.assert_array_equal(layout.by_sequence(values), wanted)


@pytest.mark.parametrize("most", [1, 63])
def test_a_gpu_is_given_documents_and_no_mask(most):
    """Lowered only. cuDNN gets the first element and length of each document, and the window."""
    shapes = [(2, 256, h, 64) for h in (4, 2, 2)]
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    of = RowDocuments(*[jax.ShapeDtypeStruct((2, 256), "int32")] * 2)
    attend = CausalAttention(kernel="cudnn", window=100, documents=most)

    def loss(given, of):
        q, *keys = given
        return attend(q, Keys(tuple(keys)), LayerInputs(documents=of))[0].astype("float32").sum()

    traced = jax.jit(jax.grad(loss)).trace(given, of)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == text.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert "x256x256x" not in text
    # No scatter of the log-sum-exp: its zeros would be in memory for all layers at once.
    assert f"xi32>, tensor<2x4x256xf32>) -> tensor<{2 * most}x4x256xf32>" not in text
    for told in (
        f"max_seg_per_batch\\22: {most},", "PADDING_CAUSAL", "sliding_window_length\\22: 100,"
    ):  # fmt: skip
        assert text.count(told) == 2


@pytest.mark.parametrize(("dtype", "width"), [("float32", 64), ("bfloat16", 12)])
def test_what_cudnn_has_no_kernel_for(dtype, width):
    given = [jax.ShapeDtypeStruct((1, 16, 2, width), dtype)] * 3
    of = RowDocuments(*[jax.ShapeDtypeStruct((1, 16), "int32")] * 2)
    with pytest.raises(ValueError, match=f"but these are {dtype} of width {width}: change"):
        lowered(given, of)


def lowered(given, of):
    attend = CausalAttention(kernel="cudnn", documents=2)

    def run(given, of):
        q, *keys = given
        return attend(q, Keys(tuple(keys)), LayerInputs(documents=of))[0]

    traced = jax.jit(run).trace(given, of)
    return traced.lower(lowering_platforms=("cuda",))


def test_what_cudnns_offsets_cannot_count():
    given = [jax.ShapeDtypeStruct((32, 2**15, 16, 128), "bfloat16")] * 3
    of = RowDocuments(*[jax.ShapeDtypeStruct((32, 2**15), "int32")] * 2)
    with pytest.raises(ValueError, match="32 rows of 32768 tokens with 16 heads of 128 are 2.31"):
        lowered(given, of)
    lowered([jax.ShapeDtypeStruct((31, *leaf.shape[1:]), leaf.dtype) for leaf in given],
            RowDocuments(*[jax.ShapeDtypeStruct((31, 2**15), "int32")] * 2))  # fmt: skip
