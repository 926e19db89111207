"""DeepSeek-V4's attention in blocks of queries, documents, shards and slices, against one row.

Against transformers it is compared in `tests/outside` and `tests/checkpoint`, in one block.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.sharding import PartitionSpec
from programs import eqns_of

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.core.mesh import ContextParallel, make_mesh
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.families.deepseek_v4 import blocks
from jaxpipe.model.families.deepseek_v4.attention import MIXERS, empty_state
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.parts import LayerInputs, init_from
from jaxpipe.model.options import LayerParts, Sharing

SIZES = {
    "n_layers": 1, "d_model": 16, "vocab_size": 8, "n_heads": 4, "d_ff": 8, "head_dim": 8,
    "qk_rope_head_dim": 4, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6, "n_experts": 8,
    "csa_rate": 4, "hca_rate": 16, "index_n_heads": 8, "index_head_dim": 6, "index_topk": 5,
}  # fmt: skip


# Documents of two rows of 48 tokens: shorter than an entry, exactly one, several; then padding.
ROWS = ((3, 16, 21, 8), (1, 33, 4, 5))
KINDS = ("window", "csa", "hca")


def attention_of(kind, sharing=None, **sizes):
    config = DeepseekV4Config(**SIZES | sizes).of_kind(kind)
    parts = LayerParts(sharing or Sharing())
    return MIXERS[kind](config, parts, init_from(jax.random.key(0)))


def mixed(attention, x, documents=None):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    if documents is not None:
        positions = documents.positions
    return attention(x, positions, LayerInputs(documents=documents))[0]


def drawn(seed=0, shape=(2, 48, 16)):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def documents_of(rows, length=48):
    segments, positions = np.full((len(rows), length), -1), np.zeros((len(rows), length), int)
    for i, lengths in enumerate(rows):
        segments[i, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        positions[i, : sum(lengths)] = np.concatenate([*map(np.arange, lengths)])
    return RowDocuments(jnp.asarray(segments), jnp.asarray(positions))


def value_and_gradients(run, *arrays):
    """Return `run(*arrays)` and the gradients of a function of it."""

    def total(arrays):
        made = run(*arrays)
        return jnp.sin(made * jnp.arange(1, made.shape[1] + 1)[None, :, None]).sum(), made

    (_, made), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
    return made, gradients


@pytest.mark.parametrize("window", [20, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_queries_equal_one_block(kind, window, monkeypatch):
    """150 queries are 3 blocks, the last of which is padded; windows reach over blocks."""
    with jax.enable_x64(True):
        attention = attention_of(kind, sliding_window=window)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 150, 16)))
        dy = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape))

        def results():
            y, pull = jax.vjp(partial(mixed, attention), x)
            return y, pull(dy)[0]

        got = jax.jit(results)()
        monkeypatch.setattr(blocks, "ROWS", 150)
        for one, whole in zip(got, jax.jit(lambda: results())()):
            np.testing.assert_allclose(one, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_each_alone(kind):
    """Outputs and gradients; at other documents the gradient is exactly zero."""
    places = [
        (i, end - n, end) for i, row in enumerate(ROWS) for end, n in zip(np.cumsum(row), row)
    ]
    lengths = np.array([end - begin for _, begin, end in places])
    within = (np.arange(48)[None] < lengths[:, None])[..., None]

    def alone(x):  # tokens of a row of one document; a causal model ignores the zeros after it
        rows = (x[i, begin:end] for i, begin, end in places)
        return jnp.stack([jnp.zeros_like(x[0]).at[: len(row)].set(row) for row in rows])

    def of_each(run):
        y, pull = jax.vjp(lambda x: jnp.where(within, run(x), 0), drawn())
        every_dy = np.eye(len(places))[..., None, None] * drawn(1, y.shape)[None]
        return y, jax.vmap(lambda dy: pull(dy)[0])(every_dy)

    with jax.enable_x64(True):
        attention, documents = attention_of(kind, sliding_window=6, hca_rate=8), documents_of(ROWS)
        got = jax.jit(lambda: of_each(lambda x: alone(mixed(attention, x, documents))))()
        want = jax.jit(lambda: of_each(lambda x: mixed(attention, alone(x))))()
        assert_same(got, want)
    for dx, (i, begin, end) in zip(np.array(got[1]), places):
        dx[i, begin:end] = 0
        assert not dx.any()


@pytest.mark.parametrize("rows", [None, ROWS], ids=["one_text", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_devices_are_the_row(kind, rows):
    """Shards of 12 tokens, of which windows and the tokens of entries reach over several."""
    with jax.enable_x64(True):
        sizes = {"sliding_window": 17, "hca_rate": 12, "csa_rate": 6}
        sequence, axes = ContextParallel(4), PartitionSpec(None, ("dp", "ep"))
        mesh = make_mesh(1, 4, devices=jax.devices()[:4])
        on_devices = attention_of(kind, Sharing(sequence=sequence), **sizes)
        documents = None if rows is None else documents_of(rows)

        def of_shard(x, documents):
            positions = jnp.broadcast_to(sequence.positions(x.shape[1]), x.shape[:2])
            if documents is not None:
                positions = documents.positions
            return on_devices(x, positions, LayerInputs(documents=documents))[0]

        shards = jax.shard_map(of_shard, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
        one = partial(mixed, attention_of(kind, **sizes), documents=documents)
        got = value_and_gradients(lambda x: shards(x, documents), drawn())
        assert_same(got, value_and_gradients(one, drawn()))


@pytest.mark.parametrize("rows", [None, ROWS], ids=["one_text", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_the_row(kind, rows):
    """Slices of 12 tokens, as above; what comes after a slice in the buffers is not read."""
    with jax.enable_x64(True):
        sizes, slices = {"sliding_window": 17, "hca_rate": 12, "csa_rate": 6}, 4
        sharing = Sharing(slices=slices)
        attention, length = attention_of(kind, sharing, **sizes), 48 // slices
        documents = None if rows is None else documents_of(rows)
        empty = empty_state(
            attention.config, kind, drawn(), length, sharing, documents=rows is not None
        )

        def split(leaf):
            return leaf.reshape(len(leaf), slices, length, *leaf.shape[2:]).swapaxes(0, 1)

        def of_slice(state, arrays):
            begin, x, documents = arrays
            positions = jnp.broadcast_to(begin + jnp.arange(length), x.shape[:2])
            if documents is not None:
                positions = documents.positions
            y, cache = attention(
                x, positions, LayerInputs(Cache(state, begin), documents=documents)
            )
            return cache.parts, y

        def of_slices(x):
            arrays = length * jnp.arange(slices), split(x), jax.tree.map(split, documents)
            return jax.lax.scan(of_slice, empty, arrays)[1].swapaxes(0, 1).reshape(x.shape)

        one = partial(mixed, attention_of(kind, **sizes), documents=documents)
        assert_same(value_and_gradients(of_slices, drawn()), value_and_gradients(one, drawn()))


def test_shards_without_complete_entries_are_refused():
    attention = attention_of("csa", Sharing(slices=2))
    x = drawn(shape=(1, 6, 16))
    with pytest.raises(ValueError, match="6 tokens of a shard or slice do not divide into entries"):
        mixed(attention, x)


def test_ways_to_share_a_sequence_that_have_no_entries_are_refused():
    model = DeepseekV4Config(**SIZES)
    for heads in (1, 2):
        [sentence] = model.unmet_by_attention(AttentionCase(FullSequence(2, heads)), tp=1)
        assert "parallel.cp_method must be 'gather' with parallel.cp=2" in sentence
    assert not [*model.unmet_by_attention(AttentionCase(FullSequence(2), True, documents=3), tp=1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_sees_no_later_token(kind):
    with jax.enable_x64(True):
        attention = attention_of(kind, sliding_window=8)
        x = np.random.default_rng(0).standard_normal((1, 100, 16))
        later = x.copy()
        later[:, 70:] += 1
        y, changed = (np.asarray(mixed(attention, jnp.asarray(each))) for each in (x, later))
    np.testing.assert_array_equal(y[:, :70], changed[:, :70])
    assert (y[:, 70:] != changed[:, 70:]).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "most"), [("csa", 512), ("hca", 64)])
def test_no_array_has_all_queries_and_all_entries(kind, most, packed):
    """Neither in F nor in its gradient, of 64k tokens: chosen indices alone are stored."""
    length = 65536
    attention = attention_of(kind, csa_rate=4, hca_rate=128, index_topk=512, sliding_window=128)
    x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    documents = RowDocuments(tokens, tokens) if packed else None
    gradient = jax.grad(lambda x, documents: mixed(attention, x, documents).sum())
    made = jax.make_jaxpr(gradient)(x, documents)
    sizes = [var.aval.size for eqn, *_ in eqns_of(made.jaxpr) for var in eqn.outvars]
    assert max(sizes) <= length * most < length * length // attention.rate
