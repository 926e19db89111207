"""The gates of MLPs and experts against their formulas, on both sides of every clamp."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.model.layers.gated import gated, hidden_products


def test_a_clamped_gate_is_gpt_oss_s():
    """As transformers' `GptOssExperts._apply_gate`: the gate has an upper bound alone."""
    gate, up = np.meshgrid([-20.0, -7.5, -1.0, 6.5, 7.5, 20.0], [-9.0, -6.0, 0.5, 6.0, 9.0])
    bounded, limited = np.minimum(gate, 7), np.clip(up, -7, 7)
    want = bounded / (1 + np.exp(-1.702 * bounded)) * (limited + 1)
    with jax.enable_x64(True):
        got, pull = jax.vjp(lambda g, u: gated("clamped", g, u), jnp.array(gate), jnp.array(up))
        at_gate, at_up = map(np.asarray, pull(jnp.ones_like(got)))
    np.testing.assert_allclose(got, want, rtol=1e-13)
    assert ((at_gate == 0) == (gate > 7)).all()
    assert ((at_up == 0) == (np.abs(up) > 7)).all()


def test_a_limited_gate_is_deepseek_v4_s():
    """As transformers' `DeepseekV4MLP`: the gate has an upper bound alone."""
    gate, up = np.meshgrid([-20.0, -10.5, -1.0, 9.5, 10.5], [-12.0, -9.0, 0.5, 9.0, 12.0])
    bounded = np.minimum(gate, 10)
    want = bounded / (1 + np.exp(-bounded)) * np.clip(up, -10, 10)
    with jax.enable_x64(True):
        got, pull = jax.vjp(lambda g, u: gated("limited", g, u), jnp.array(gate), jnp.array(up))
        at_gate, at_up = map(np.asarray, pull(jnp.ones_like(got)))
    np.testing.assert_allclose(got, want, rtol=1e-13)
    assert ((at_gate == 0) == (gate > 10)).all()
    assert ((at_up == 0) == (np.abs(up) > 10)).all()


def test_the_tanh_form_of_gelu():
    x = np.linspace(-3, 3, 7)
    want = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * 2
    with jax.enable_x64(True):
        np.testing.assert_allclose(gated("gelu_tanh", jnp.array(x), 2.0), want, rtol=1e-12)


def test_the_square_of_relu_has_no_gate():
    x = np.linspace(-3, 3, 7)
    assert hidden_products("relu2") == ("up",)
    np.testing.assert_array_equal(gated("relu2", jnp.array(x)), np.maximum(x, 0) ** 2)
