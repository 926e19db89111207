"""The router's weights and gradients against a Jacobian by hand, also where scores underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import SIZES

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.moe.router import Router
from jaxpipe.model.layers.parts import init_from
from jaxpipe.model.options import LayerParts

EXPERTS = 8
LOGITS = np.array(
    [
        [0.5, -1, 2, 0.25, -0.75, 1, -2, 0],  # typical scores
        [-110, -115, 3, 0, 1, -1, 2, 0.5],  # both chosen scores underflow
        [-110, -30, 3, 0, 1, -1, 2, 0.5],  # one of the chosen scores underflows
        [-50, -47, 3, 0, 1, -1, 2, 0.5],  # 1e-20 counts as much as their sum
        [-120, -121, -119, -118, -117, -122, -125, -130],  # all scores underflow
        [90, 40, 0, -90, -20, 10, 5, 1],
    ]
)
BIAS = np.array([2.0, 2.0] + [0.0] * 6)  # experts 0 and 1 are chosen


def router_of(score, **sizes):
    sizes = SIZES | {"d_model": EXPERTS, "n_experts": EXPERTS, "experts_per_token": 2} | sizes
    config = LlamaConfig(**sizes, router_score=score, router_scale=2.5, router_bias_rate=0.001)
    router = Router(config, LayerParts(), init_from(jax.random.key(0)))
    router.gate[...] = jnp.eye(EXPERTS)  # so that logits equal the router's input
    return router


def scores_of(score, logits):
    """Return scores and their Jacobian by the logits, `[T, E]` and `[T, E, E]`, in float64."""
    if score == "sigmoid":
        made = 1 / (1 + np.exp(-logits))
        return made, (made / (1 + np.exp(logits)))[..., None] * np.eye(EXPERTS)
    made = np.exp(logits - logits.max(-1, keepdims=True))
    made /= made.sum(-1, keepdims=True)
    return made, made[..., None] * (np.eye(EXPERTS) - made[:, None, :])


def over_sum(scores, by_logits):
    """Return scores over their sum as in DeepSeek-V3, with the Jacobian by the logits."""
    total = scores.sum(-1, keepdims=True) + 1e-20
    by_scores = np.eye(scores.shape[-1]) / total[..., None] - (scores / total**2)[..., None]
    return scores / total, by_scores @ by_logits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_and_shares_where_scores_underflow(score, dtype):
    router = router_of(score)
    x = jnp.asarray(LOGITS, dtype)[None]
    dweights = np.random.default_rng(0).standard_normal((len(LOGITS), 2))
    dshares = np.random.default_rng(1).standard_normal(LOGITS.shape)

    def made(x):
        routes = router(x, jnp.asarray(BIAS))
        total = (routes.weights_BLK[0] * dweights).sum() + (routes.shares_BLE[0] * dshares).sum()
        return total, routes

    (_, routes), dx = jax.jit(jax.value_and_grad(made, has_aux=True))(x)
    scores, by_logits = scores_of(score, np.asarray(x[0], np.float64))
    choice = np.argsort(-(scores + BIAS), axis=-1, kind="stable")[:, :2]
    np.testing.assert_array_equal(np.sort(routes.choice_BLK[0]), np.sort(choice))
    choice = np.asarray(routes.choice_BLK[0])
    chosen = np.take_along_axis(scores, choice, -1)
    weights, by_x = over_sum(chosen, np.take_along_axis(by_logits, choice[..., None], 1))
    shares, shares_by_x = scores, by_logits
    if score == "sigmoid":
        shares, shares_by_x = over_sum(scores, by_logits)
    np.testing.assert_allclose(routes.weights_BLK[0], 2.5 * weights, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(routes.shares_BLE[0], shares, rtol=1e-6, atol=1e-12)
    want = np.einsum("tk,tkx->tx", 2.5 * dweights, by_x)
    want += np.einsum("te,tex->tx", dshares, shares_by_x)
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(dx[0], want, rtol=tolerance, atol=tolerance)


def test_weights_of_groups_where_scores_underflow():
    router = router_of("sigmoid", expert_groups=4, groups_per_token=1)

    def made(x):
        routes = router(x, jnp.asarray(BIAS))
        return (routes.weights_BLK**2).sum(), routes

    x = jnp.asarray(LOGITS, jnp.float32)[None]
    (_, routes), dx = jax.value_and_grad(made, has_aux=True)(x)
    assert np.isfinite(dx).all()
    scores, by_logits = scores_of("sigmoid", LOGITS)
    weights, _ = over_sum(scores[:, :2], by_logits[:, :2])  # of the first group
    got = np.take_along_axis(routes.weights_BLK[0], np.argsort(routes.choice_BLK[0]), -1)
    np.testing.assert_allclose(got, 2.5 * weights, rtol=1e-6, atol=1e-12)
