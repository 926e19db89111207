"""Look-ups of n-grams against NumPy; meshes are in `tests/models_on_meshes`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import problem
from oracles import ngrams

from jaxpipe.core.executor import step_ref
from jaxpipe.model.families.engram.config import EngramConfig
from jaxpipe.model.families.engram.decoder import hash_factors, hash_ngrams
from jaxpipe.model.layers.parts import PLAIN_DOT
from jaxpipe.model.neighbours import rows_before

SIZES = {"d_model": 16, "vocab_size": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}


@jax.enable_x64(True)
def test_a_layer_adds_what_numpy_computes():
    decoder, _, layers, batch = problem("packed_engram", jnp.float64)
    params, config = layers[1], decoder.config
    rows = {name: np.asarray(leaf[0]) for name, leaf in batch.items()}
    x = np.random.default_rng(0).normal(size=(*rows["inputs"].shape, config.d_model))
    layer = nnx.merge(decoder._layers["ngram_sparse"], params)
    got = layer.ngram(jnp.asarray(x), rows, PLAIN_DOT)
    params = jax.device_get(params["ngram"])
    factors = hash_factors(config.ngram_heads)
    for row, found in enumerate(got):
        given = x[row], rows["segments"][row], rows["inputs"][row]
        want = ngrams.added(params, factors, *given, config.norm_eps)
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-16)


@jax.enable_x64(True)
def test_no_gradient_crosses_documents():
    """Tables get gradients at the rows of n-grams of the document that has targets, alone."""
    decoder, shared, layers, _ = problem("packed_engram", jnp.float64)
    segments = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    rows = {
        "inputs": np.arange(8), "targets": np.where(segments == 1, np.arange(1, 9), -100),
        "segments": segments, "positions": np.array([0, 1, 2, 0, 1, 2, 3, 0]),
    }  # fmt: skip
    rows |= rows_before(rows, 2)
    got = step_ref(
        decoder.functions, shared, layers, jax.tree.map(lambda row: row[None, None], rows),
        variables=decoder.functions.variables,
    )  # fmt: skip
    factors, size = hash_factors(decoder.config.ngram_heads), decoder.config.ngram_rows
    document = [None, None, *range(3, 7)]
    want = [
        {ngrams.hashed(document[i : i + 3][::-1][:order], of_table, size) for i in range(4)}
        for of_table, order in zip(factors, [2] * 4 + [3] * 4)
    ]
    for layer in (1, 2):
        read = np.abs(got.gradients["layers"][layer]["ngram"]["tables"]).sum(-1)
        assert [set(np.flatnonzero(of_table)) for of_table in read] == want


def test_rows_are_used_evenly():
    """Of 2^16 n-grams of 256 tokens in 64 rows; the deviation is that of random choices."""
    pairs = np.stack(np.divmod(np.arange(2**16), 256))
    tokens = jnp.asarray(np.concatenate([pairs, pairs[:1] * 0 - 1])[:, None], jnp.int32)
    rows = np.asarray(hash_ngrams(tokens, jnp.asarray(hash_factors(4)), 64))[0]
    for of_table in rows.T:
        counts = np.bincount(of_table, minlength=64)
        assert counts.std() < 2 * 1024**0.5
    assert (rows[:, :1] != rows[:, 1:]).mean() > 0.9  # tables hash differently


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ngram_layers": (1, 2)}, r"ngram_layers=\[1, 2\] must be .* below model.n_layers=2"),
        ({"ngram_layers": (1, 1)}, "different"),
        ({"ngram_layers": ()}, "one or more"),
        ({"ngram_heads": 3}, "ngram_heads=3 must be a multiple of parallel.tp=2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    config = EngramConfig(**SIZES, **{"ngram_rows": 8, "ngram_width": 4} | fields)
    (broken,) = config.broken_rules(tp=2)
    assert re.search(message, broken)


def test_parameters_are_counted():
    decoder, shared, layers, _ = problem("packed_engram", jnp.float64)
    total = sum(leaf.size for leaf in jax.tree.leaves((shared, layers)))
    assert decoder.config.parameter_count() == total
