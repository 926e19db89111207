"""Log-probabilities at a temperature, entropies, and those of chosen and most likely tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.mesh import TP, TensorParallel
from jaxpipe.model.loss import IGNORE, ScoreOptions, score_targets

VOCABULARY, K, T = 11, 4, 0.7  # of two devices the second has a logit of padding


def problem():
    rng = np.random.default_rng(0)
    logits = 4 * rng.normal(size=(2, 3, VOCABULARY))
    targets = np.array([[3, 10, IGNORE], [0, 7, 2]], np.int32)
    choices = rng.integers(0, VOCABULARY, (2, 3, K)).astype(np.int32)
    choices[0, 2] = -1  # free where no target counts
    return logits, targets, choices


def by_numpy(logits, targets, choices, temperature, cap):
    """The log-probabilities, entropies, those of choices and of the most likely; numpy float64."""
    logits = (cap * np.tanh(logits / cap) if cap else logits) / temperature
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy, counts = -(np.exp(logprobs) * logprobs).sum(-1), targets != IGNORE
    top = np.argsort(-logprobs, axis=-1)[..., :K]

    def at(ids):
        return np.take_along_axis(logprobs, np.clip(ids, 0, None), axis=-1) * counts[..., None]

    one = at(targets[..., None])[..., 0]
    return one, entropy * counts, at(choices), top * counts[..., None], at(top)


def scored(logits, targets, choices, temperature, cap, size):
    """The same by `score_targets`, of logits whose vocabulary `size` devices share."""
    devices = TensorParallel(size) if size > 1 else ONE_DEVICE
    options = ScoreOptions(temperature, entropy=True, top=K)

    def score(logits):
        return score_targets(logits, targets, devices, VOCABULARY, cap, options, choices)

    if size > 1:
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, -VOCABULARY % size)), constant_values=9.0)
        spec = PartitionSpec(None, None, TP)
        mesh = Mesh(np.array(jax.devices()[:size]), (TP,))
        score = jax.shard_map(
            score, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
        )
    made = score(logits)
    return made.logprobs_BL, *made[2:]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (T, 0.0), (3.0, 5.0)])
def test_scores_are_those_of_numpy(size, temperature, cap):
    with jax.enable_x64(True):
        given = *problem(), temperature, cap
        for got, want in zip(scored(*given, size), by_numpy(*given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_those_of_plain_logits(size):
    """Of a weighted sum of all, by jax of the definition, on one device."""
    with jax.enable_x64(True):
        logits, targets, choices = problem()
        weights = [np.random.default_rng(1).normal(size=(2, 3, n)) for n in (1, 1, K)]

        def total(values):
            values = [value.reshape(2, 3, -1) for value in values]
            return sum((value * weight).sum() for value, weight in zip(values, weights))

        def plain(logits):
            logprobs = jax.nn.log_softmax(logits / T)
            counts = (targets != IGNORE)[..., None]
            ids = np.concatenate([targets[..., None], choices], -1).clip(0)
            picked = jnp.where(counts, jnp.take_along_axis(logprobs, ids, -1), 0)
            entropy = jnp.where(counts, -(jnp.exp(logprobs) * logprobs).sum(-1, keepdims=True), 0)
            return total([picked[..., :1], entropy, picked[..., 1:]])

        def ours(logits):
            return total(scored(logits, targets, choices, T, 0.0, size)[:3])

        got, want = jax.grad(ours)(jnp.asarray(logits)), jax.grad(plain)(jnp.asarray(logits))
        # Outside of `shard_map` the gradient of a replicated output is divided by the devices.
        np.testing.assert_allclose(got * size, want, rtol=1e-12, atol=1e-13)


def test_a_temperature_of_one_changes_no_bit():
    logits, targets, _ = problem()
    logits = logits.astype(np.float32)
    plain, one = (
        score_targets(logits, targets),
        score_targets(logits, targets, options=ScoreOptions(1.0, entropy=True, top=2)),
    )
    np.testing.assert_array_equal(plain.logprobs_BL, one.logprobs_BL)
    np.testing.assert_array_equal(plain.greedy_BL, one.greedy_BL)
