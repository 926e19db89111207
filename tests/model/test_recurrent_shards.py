"""Recurrences and convolutions over a sequence that devices share, against one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.sharding import PartitionSpec
from meshes import MODELS
from oracles import recurrence

from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.core.mesh import ContextParallel, make_mesh
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.recurrent.chunks import Tokens
from jaxpipe.model.recurrent.convolution import causal_convolution
from jaxpipe.model.recurrent.shards import (
    apply_summary,
    inputs_before_shard,
    recurrence_of_shards,
    summarise,
)

B, L, G, R, K, V, DEVICES = 2, 20, 2, 2, 4, 3, 4
# Mamba-2, a gated delta network, and Kimi delta attention.
RECURRENCES = {"decays": (False, 1), "delta": (True, 1), "channels": (True, K)}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def drawn(kind, starts=()):
    """Tokens in which documents start at some places, and a state."""
    rng, (corrects, channels) = np.random.default_rng(0), RECURRENCES[kind]
    q, k = (rng.normal(size=(B, L, G, K)) for _ in range(2))
    decays = -0.2 * rng.exponential(size=(B, L, G, R, channels))
    tokens = Tokens(
        q, k / np.linalg.norm(k, axis=-1, keepdims=True), rng.normal(size=(B, L, G, R, V)),
        decays if channels > 1 else decays[..., 0], rng.random((B, L, G, R)) if corrects else None,
        np.isin(np.arange(L), starts)[None].repeat(B, 0) if starts else None,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, (tokens, rng.normal(size=(B, G, R, K, V))))


def on_devices(run, sharded, replicated):
    """Return `run(sequence, sharded, replicated)` of devices with a shard of axis 1 each."""
    sequence, axes = ContextParallel(DEVICES), PartitionSpec(None, ("dp", "ep"))
    mesh = make_mesh(1, DEVICES, devices=jax.devices()[:DEVICES])
    return jax.shard_map(
        lambda *given: run(sequence, *given), mesh=mesh,
        in_specs=(axes, PartitionSpec()), out_specs=(axes, PartitionSpec()), check_vma=False,
    )(sharded, replicated)  # fmt: skip


@pytest.mark.parametrize("starts", [(), (5, 12, 13)])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_shards_are_the_recurrence(kind, starts):
    (*floats, begins), state = drawn(kind, starts)

    def value(run, floats, state):
        made, after = run(Tokens(*floats, begins), state)
        return jnp.sin(made).sum() + (after**2).sum(), (made, after)

    def shards(tokens, state):
        return on_devices(
            lambda sequence, *given: recurrence_of_shards(sequence, *given, 4), tokens, state
        )

    def gradients(run):
        both = jax.value_and_grad(lambda *given: value(run, *given), (0, 1), has_aux=True)
        return jax.jit(both)(tuple(floats), state)

    assert_same(gradients(shards), gradients(recurrence.linear_recurrence))


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_start_of_a_document_cuts_off_what_was_before(kind):
    tokens, state = drawn(kind, (7,))
    summary = summarise(tokens, 4)
    assert (summary[..., V:] == 0).all()
    assert (apply_summary(summary, state) == apply_summary(summary, -state)).all()


@pytest.mark.parametrize("length", [1, 2, 5])  # of which 1 is less than the inputs that are read
def test_convolutions_read_the_inputs_of_devices_before(length):
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(B, DEVICES * length, V)), rng.normal(size=(3, V))
    given = jnp.asarray(x), jnp.asarray(rng.normal(size=(B, 2, V)))

    def shards(x, before):
        def run(sequence, x, before):
            before, last = inputs_before_shard(sequence, x, before)
            return causal_convolution(x, taps, before, None)[0], last

        return on_devices(run, x, before)

    def gradients(run):
        both = jax.value_and_grad(lambda *y: sum(jnp.sin(part).sum() for part in run(*y)), (0, 1))
        return jax.jit(both)(*given)

    assert_same(gradients(shards), gradients(lambda x, b: causal_convolution(x, taps, b, None)))


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        (FULL_SEQUENCE, None),
        (FullSequence(2), None),
        (FullSequence(2, heads=2), None),
        (FullSequence(2, heads=1), "an early and a late part .* set parallel.cp_method=gather"),
        (FullSequence(4, heads=2), "an early and a late part .* set parallel.cp_method=gather"),
        (FullSequence(4, heads=4), "exchange 2 heads of a gated .* set parallel.cp_method=gather"),
    ],
)
def test_what_is_refused(sequence, said):
    unmet = MODELS["qwen3_next"].unmet_by_attention(AttentionCase(sequence), tp=2)
    sentences = [sentence for sentence in unmet if "gated delta network" in sentence]
    assert len(sentences) == (said is not None)
    for sentence in sentences:
        assert re.search(said, sentence)
