"""Recurrences in chunks against one token after the other, and short convolutions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from flax import nnx
from mesh_models import HYBRID, MODELS
from msgspec.structs import replace
from oracles import recurrence

from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.parts import LayerInputs, init_from
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.chunks import Tokens, linear_recurrence, unit_lower_inverse
from jaxpipe.model.recurrent.convolution import causal_convolution
from jaxpipe.model.recurrent.gated_delta import GatedDeltaNetwork, normalise
from jaxpipe.model.recurrent.mamba2 import Mamba2
from jaxpipe.model.recurrent.shards import summarise

B, L, G, R, K, V = 2, 21, 2, 3, 4, 5


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def drawn(*, starts=False, decay=1.0, corrects=True, channels=False):
    rng = np.random.default_rng(0)
    sizes = (B, L, G, K), (B, L, G, K), (B, L, G, R, V)
    q, k, v = (jnp.asarray(rng.normal(size=size)) for size in sizes)
    each = (B, L, G, R, K) if channels else (B, L, G, R)
    decays = -decay * jnp.asarray(rng.exponential(size=each))
    rates = jnp.asarray(rng.random((B, L, G, R))) if corrects else None
    begins = jnp.asarray(rng.random((B, L)) < 0.2) if starts else None
    state = jnp.asarray(rng.normal(size=(B, G, R, K, V)))
    return Tokens(q, normalise(k), v, decays, rates, begins), state


def loss_and_gradients(run, tokens, state):
    *floats, starts = tokens

    def loss(floats, state):
        made, after = run(Tokens(*floats, starts), state)
        return jnp.sin(made).sum() + (after**2).sum(), (made, after)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(tuple(floats), state)


@pytest.mark.parametrize(
    ("starts", "corrects", "channels"),
    [
        (False, False, False), (False, True, False), (True, False, False), (True, True, False),
        (True, True, True),
    ],
)  # fmt: skip
def test_chunks_are_the_recurrence(starts, corrects, channels):
    tokens, state = drawn(starts=starts, corrects=corrects, channels=channels)
    want = loss_and_gradients(recurrence.linear_recurrence, tokens, state)
    for chunk in (1, 8, 64):  # of which 8 does not divide the length
        run = partial(linear_recurrence, chunk=chunk)
        assert_same(loss_and_gradients(run, tokens, state), want)


@pytest.mark.parametrize("channels", [False, True])
def test_a_state_that_decays_at_once_is_finite(channels):
    """Of decays within a chunk only differences are taken, and of tokens before alone."""
    tokens, state = drawn(starts=True, decay=100.0, channels=channels)
    want = loss_and_gradients(recurrence.linear_recurrence, tokens, state)
    assert_same(loss_and_gradients(partial(linear_recurrence, chunk=16), tokens, state), want)


def test_channels_beside_one_that_forgets_are_exact():
    """No sum of a chunk's decays is so large that a difference of two loses what is small."""
    tokens, state = drawn(channels=True, decay=0.1)
    forgets = tokens.decay_BLGR.at[:, 2].set(-1e4)  # float32 has 0.001 beside it
    tokens = tokens._replace(decay_BLGR=forgets)
    want = loss_and_gradients(recurrence.linear_recurrence, tokens, state)
    narrow = jax.tree.map(jnp.float32, (tokens, state))
    got = loss_and_gradients(partial(linear_recurrence, chunk=32), *narrow)
    assert_same(got, want, 1e-6)


@pytest.mark.parametrize("channels", [False, True])
def test_slices_hand_on_their_state(channels):
    tokens, state = drawn(channels=channels)
    run = jax.jit(linear_recurrence, static_argnums=2)
    want, after = run(tokens, state, 8)
    made = []
    for begin in range(0, L, 7):
        part = jax.tree.map(lambda x, begin=begin: x[:, begin : begin + 7], tokens)
        of_slice, state = run(part, state, 8)
        made.append(of_slice)
    assert_same((jnp.concatenate(made, 1), state), (want, after))


@pytest.mark.parametrize("summarises", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_nothing_has_a_row_of_keys_or_a_state_for_every_token(channels, summarises):
    """Neither F nor the gradient, at 4,096 tokens."""
    length, width, heads = 4096, 64, 2
    sizes = (1, length, heads, width), (1, length, heads, width), (1, length, heads, 1, width)
    rates = 1, length, heads, 1
    shapes = [*sizes, (*rates, width) if channels else rates, rates]
    floats = tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in shapes)
    state = jax.ShapeDtypeStruct((1, heads, 1, width, width), jnp.float32)

    def total(floats, state):
        if summarises:
            return summarise(Tokens(*floats), 64).sum()
        return linear_recurrence(Tokens(*floats), state, 64)[0].sum()

    largest = max(largest_values(jax.make_jaxpr(jax.grad(total))(floats, state).jaxpr))
    # The states at the starts of chunks, and what is as large.
    assert largest == (1 + summarises) * heads * length * width
    assert largest < min(length**2, heads * length * width**2)


def largest_values(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars)
        for param in eqn.params.values():
            if body := getattr(param, "jaxpr", param if hasattr(param, "eqns") else None):
                yield from largest_values(body)


def test_the_inverse_and_its_gradient():
    lower = jnp.tril(jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 16))), -1)
    eye = jnp.eye(16)[None]

    def plain(lower):
        return jnp.linalg.inv(eye + jnp.tril(lower, -1))

    want = plain(lower), jax.grad(lambda x: jnp.sin(plain(x)).sum())(lower)
    got = (
        unit_lower_inverse(lower),
        jax.grad(lambda x: jnp.sin(unit_lower_inverse(x)).sum())(lower),
    )
    assert_same(got, want, 1e-9)  # entries of the inverse are large


def test_a_convolution_reads_no_other_document_and_no_later_token():
    rng, taps = np.random.default_rng(0), 4
    x, weights = rng.normal(size=(1, 9, 3)), rng.normal(size=(taps, 3))
    positions = np.array([[2, 3, 4, 0, 1, 0, 1, 2, 3]])  # the first began before
    before = rng.normal(size=(1, taps - 1, 3))
    window, want = np.concatenate([before, x], 1), np.zeros((1, 9, 3))
    for t in range(9):
        for back in range(min(positions[0, t], taps - 1) + 1):
            want[0, t] += weights[taps - 1 - back] * window[0, t + taps - 1 - back]
    arguments = (jnp.asarray(weights), jnp.asarray(before), jnp.asarray(positions))
    made, last = causal_convolution(jnp.asarray(x), *arguments)
    assert_same((made, last), (want, x[:, -3:]))
    one, tail = causal_convolution(jnp.asarray(x[:, :1]), *arguments[:2], jnp.asarray([[2]]))
    assert_same((one, tail), (want[:, :1], window[:, 1:4]))  # a slice shorter than the taps


MIXERS = {
    GatedDeltaNetwork: Qwen3NextConfig(**HYBRID),
    Mamba2: MODELS["nemotron_h"],
}


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.NAME)
def test_documents_have_no_gradient_at_each_other(mixer):
    config = MIXERS[mixer]
    network = mixer(config, LayerParts(), init_from(jax.random.key(0)))
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3]])  # the second begins within a chunk
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, config.d_model)))
    given = LayerInputs(documents=RowDocuments(jnp.zeros_like(positions), positions))

    def of_second(x):
        made = network(x, positions, given)[0][:, 5:]
        return (made**2).sum(), made

    gradient, made = jax.jit(jax.grad(of_second, has_aux=True))(x)
    assert (gradient[:, :5] == 0).all()
    assert (gradient[:, 5:] != 0).all()
    alone = jax.jit(lambda x: network(x, positions[:, 5:], LayerInputs())[0])(x[:, 5:])
    assert_same(made, alone)


def test_a_mamba_2_is_the_formula_of_its_layer():
    """Token by token, with biases, steps that are raised, groups of heads, and skips."""
    config = replace(MODELS["nemotron_h"], mamba_step_min=0.02)
    network = Mamba2(config, LayerParts(), init_from(jax.random.key(0)))
    rng, names = np.random.default_rng(0), ("conv_x_bias", "conv_b_bias", "conv_c_bias", "skip")
    for name in (*names, "norm_scale"):
        vector = getattr(network, name)
        vector.set_value(jnp.asarray(rng.normal(size=vector[...].shape)))
    x = rng.normal(size=(7, config.d_model))
    weights = nnx.to_pure_dict(nnx.state(network))
    weights = jax.tree.map(lambda weight: np.asarray(weight, float), weights)
    want, steps = recurrence.mamba_2(weights, x, config)
    assert (steps == config.mamba_step_min).any()
    assert (steps > config.mamba_step_min).any()
    assert_same(network(jnp.asarray(x)[None], None, LayerInputs())[0][0], want)
