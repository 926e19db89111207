"""Attention to chosen keys against NumPy, and what its programs hold at 128k tokens."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from scipy.special import log_softmax, softmax

from jaxpipe.core.contract import Context
from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.core.split import POLICIES
from jaxpipe.core.split.ports import Cotangent
from jaxpipe.core.split.split import split_layer
from jaxpipe.model import FAMILIES
from jaxpipe.model.attention import indexed
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.attention.indexed import IndexedAttention, IndexQueries
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.parts import LayerInputs

BATCH, LENGTH, HEADS, WIDTH, VALUE, INDEX_HEADS, INDEX_WIDTH, TOPK = 2, 12, 4, 6, 3, 8, 5, 4
POSITIONS = np.array([[*range(7), *range(5)], [*range(2), *range(10)]])  # in two documents each
MODEL = DeepseekConfig(
    family="deepseek", n_layers=2, d_model=24, n_heads=4, d_ff=40, vocab_size=64, kv_lora_rank=10,
    q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, index_topk=4,
    index_n_heads=8, index_head_dim=6,
)  # fmt: skip


def keys_and_values(key, value):
    return key, value


def attention(topk=TOPK, **fields):
    """Return attention whose queries and values are multiplied with weights, as latents are."""
    return IndexedAttention(
        topk,
        keys_and_values,
        lambda q, weights: q * weights[None, None],
        lambda mixed, weights: mixed + weights[None, None],
        **fields,
    )


@pytest.fixture
def operands():
    """Queries of attention and of the indexer, its weights, keys, values, its keys, weights."""
    rng = np.random.default_rng(0)
    shapes = (HEADS, WIDTH), (INDEX_HEADS, INDEX_WIDTH), (INDEX_HEADS,), (1, WIDTH), (1, VALUE)
    shapes = [(BATCH, LENGTH, *shape) for shape in (*shapes, (1, INDEX_WIDTH))]
    return [rng.standard_normal(shape) for shape in (*shapes, (HEADS, 1))]


def called(module, q, index_q, weight, k, v, index_k, weights, positions=POSITIONS):
    documents = RowDocuments(jnp.zeros_like(positions), jnp.asarray(positions))
    q, index_q, weight, k, v, index_k, weights = map(jnp.asarray, (
        q, index_q, weight, k, v, index_k, weights
    ))  # fmt: skip
    index = IndexQueries(index_q, weight)
    given = LayerInputs(documents=documents)
    return module(q, index, (k, v, index_k), weights, given)[:2]


def by_numpy(topk, q, index_q, weight, k, v, index_k, weights):
    """Return output, losses and chosen keys, one query after the other."""
    mixed, losses = np.zeros((BATCH, LENGTH, HEADS, VALUE)), np.zeros((BATCH, LENGTH))
    chosen = {}
    for b, t in np.ndindex(BATCH, LENGTH):
        seen = np.arange(t - POSITIONS[b, t], t + 1)
        each = np.maximum(index_k[b, seen, 0] @ index_q[b, t].T * INDEX_WIDTH**-0.5, 0)
        score = each @ weight[b, t]
        best = np.argsort(-score, kind="stable")[: topk or None]
        own = seen[best]
        query = q[b, t] * weights
        share = softmax(query @ k[b, own, 0].T * WIDTH**-0.5, axis=-1)
        mixed[b, t] = share @ v[b, own, 0] + weights
        target = share.mean(0)
        losses[b, t] = (target * (np.log(target) - log_softmax(score[best]))).sum()
        chosen[b, t] = own
    return mixed, losses, chosen


@pytest.mark.parametrize("topk", [TOPK, 0])
@pytest.mark.parametrize("most", [2**27, 1])
def test_output_and_losses(operands, topk, most, monkeypatch):
    """In one block of queries, and in blocks of a single query."""
    monkeypatch.setattr(indexed, "_MOST", most)
    with jax.enable_x64(True):
        found = called(attention(topk), *operands)
    want = by_numpy(topk, *operands)[:2]
    for got, expected in zip(found, want):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("most", [2**27, 600])
def test_gradients(operands, most, monkeypatch):
    """The output's at queries, keys and values; the loss's at those of the indexer."""
    monkeypatch.setattr(indexed, "_MOST", most)
    chosen = by_numpy(TOPK, *operands)[2]
    mask = np.zeros((BATCH, LENGTH, LENGTH), bool)
    for (b, t), own in chosen.items():
        mask[b, t, own] = True
    rng = np.random.default_rng(1)
    dy, dloss = rng.standard_normal((BATCH, LENGTH, HEADS, VALUE)), rng.random((BATCH, LENGTH))

    def plain(q, index_q, weight, k, v, index_k, weights):
        score = jnp.einsum("blhk,bsk->bhls", q * weights[None, None], k[:, :, 0]) * WIDTH**-0.5
        share = jax.nn.softmax(jnp.where(mask[:, None], score, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhls,bsv->blhv", share, v[:, :, 0]) + weights[None, None]
        each = jnp.einsum("blie,bse->blis", index_q, index_k[:, :, 0]) * INDEX_WIDTH**-0.5
        own = jnp.einsum("blis,bli->bls", jax.nn.relu(each), weight)
        own = jax.nn.log_softmax(jnp.where(mask, own, -1e30), axis=-1)
        target = jax.lax.stop_gradient(share.mean(1))
        return (mixed * dy).sum() - (dloss[..., None] * target * own).sum()

    def blockwise(*operands):
        mixed, loss = called(attention(), *operands)
        return (mixed * dy).sum() + (loss * dloss).sum()

    with jax.enable_x64(True):
        places = tuple(range(len(operands)))
        found = jax.jit(jax.grad(blockwise, argnums=places))(*operands)
        want = jax.grad(plain, argnums=places)(*operands)
    for got, expected in zip(found, want):
        assert np.abs(expected).max() > 1e-2
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_equal_scores_choose_the_earlier_keys(operands):
    """A score is exactly 0 where no head's product is positive."""
    _, index_q, weight, *rest = operands
    index = IndexQueries(jnp.zeros_like(index_q), jnp.asarray(weight))
    limits = indexed.KeyRange.of(np.arange(LENGTH), BATCH, 0, None)
    found = indexed.choose_keys(index, jnp.asarray(rest[2])[:, :, 0], limits, TOPK)
    want = np.where(np.arange(TOPK) <= np.arange(LENGTH)[:, None], np.arange(TOPK), -1)
    np.testing.assert_array_equal(found, [want] * BATCH)


def test_a_ring_is_refused(operands):
    with pytest.raises(ValueError, match="set parallel.cp_method=gather"):
        called(attention(sequence=FullSequence(2, heads=1)), *operands)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"index_n_heads": 0}, "sizes of one indexer: give all three"),
        ({"q_lora_rank": 0}, "index_topk=4 needs model.q_lora_rank"),
        ({"index_head_dim": 2}, "index_head_dim=2 must be at least model.qk_rope_head_dim=4"),
        ({"index_warmup": True, "index_loss": 0.0}, "it has nothing to learn: raise it"),
        ({"index_warmup": True, "router_bias_rate": 0.1}, "router_bias_rate=0.1 changes"),
        (
            {"index_topk": 0, "index_n_heads": 0, "index_head_dim": 0, "index_loss": 2.0},
            "of an indexer, but model.index_topk=0: set model.index_topk, or leave it out",
        ),
    ],
)
def test_sizes_that_make_no_indexer_are_refused(fields, sentence):
    assert list(MODEL.broken_rules(tp=1)) == []
    model = replace(MODEL, **fields)
    assert [one for one in model.broken_rules(tp=1) if sentence in one]


@pytest.mark.parametrize(
    ("fields", "sequence", "sentence"),
    [
        ({}, FullSequence(2, heads=1), "set parallel.cp_method=gather"),
        ({"attention": "cudnn"}, FullSequence(), "set model.attention=xla"),
        ({"attention_dropout": 0.1}, FullSequence(), "set model.attention_dropout=0"),
    ],
)
def test_attention_that_cannot_choose_keys_is_refused(fields, sequence, sentence):
    unmet = replace(MODEL, **fields).unmet_by_attention(AttentionCase(sequence), tp=1)
    assert [one for one in unmet if sentence in one]
    assert not list(MODEL.unmet_by_attention(AttentionCase(FullSequence(2)), tp=1))


def test_what_is_trained():
    """All, the indexer alone, or all but the indexer."""

    def trained(**fields):
        leaves = FAMILIES["deepseek"].build(replace(MODEL, **fields)).leaves
        specs = jax.tree.leaves_with_path(leaves["layer"])
        return {jax.tree_util.keystr(path) for path, spec in specs if spec.trained}

    every, own = trained(), trained(index_warmup=True)
    assert own == {name for name in every if "indexer" in name}
    assert trained(index_loss=0.0) == every - own
    assert len(own) == 5


def layer_of(model, length, batch=1):
    """Return a layer, and the shapes of its arguments."""
    decoder = FAMILIES["deepseek"].build(model)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(partial(decoder.init_layer, index=0), key)
    params, x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
        (params, jax.ShapeDtypeStruct((batch, length, model.d_model), jnp.bfloat16)),
    )
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    rows = {"inputs": ids, "targets": ids}
    context = Context(rows, jax.ShapeDtypeStruct((), jnp.int32))
    return decoder.functions.kinds_by_name["layer"], params, x, context


@pytest.mark.parametrize("remat", POLICIES)
def test_the_choice_is_made_once(remat):
    kind, params, x, context = layer_of(MODEL, 32)
    split = split_layer(kind.layer, params, x, context, POLICIES[remat], kind.keep)
    dy, dlosses = x, {"indexer": jax.ShapeDtypeStruct((), jnp.float32)}
    forward = jax.make_jaxpr(split.forward)(params, x, context)
    given = params, context, split.residuals, Cotangent(dy, (), dlosses)
    backward = jax.make_jaxpr(split.backward)(*given)
    assert "top_k" in str(forward)
    assert "top_k" not in str(backward)


def sizes_in(jaxpr):
    """Yield the number of elements of every value of a jaxpr and of those in it."""
    for eqn in jaxpr.eqns:
        yield from (prod(var.aval.shape) for var in eqn.outvars)
        for value in jax.tree.leaves(tuple(eqn.params.values())):
            if hasattr(value, "jaxpr"):
                yield from sizes_in(value.jaxpr)


@pytest.mark.parametrize("warmup", [False, True])
def test_no_array_has_all_queries_and_all_keys(warmup):
    """Of DeepSeek-V3.2's attention at 128k tokens, in F, B and W."""
    length = 2**17
    model = DeepseekConfig(
        family="deepseek", n_layers=2, d_model=7168, n_heads=16, d_ff=64, vocab_size=64,
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, index_topk=2048, index_n_heads=64, index_head_dim=128,
        index_warmup=warmup,
    )  # fmt: skip
    kind, params, x, context = layer_of(model, length)

    def step(params, x, context):
        output, pull = jax.vjp(lambda params, x: kind.layer(params, x, context)[::2], params, x)
        return pull(jax.tree.map(jnp.ones_like, output))

    sizes = list(sizes_in(jax.make_jaxpr(step)(params, x, context).jaxpr))
    assert max(sizes) <= length * 64 * 128  # the indexer's queries
