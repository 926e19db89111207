"""How close two `(losses, gradients)` are."""

import jax
import numpy as np


def cal_diff(x, y):
    """1 - 2 x.y / (x.x + y.y): DeepSeek's measure of how far two tensors are from equal."""
    x, y = (np.asarray(leaf, np.float64).ravel() for leaf in (x, y))
    scale = x @ x + y @ y
    return 1 - 2 * (x @ y) / scale if scale else 0.0


def relative(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = np.linalg.norm(y)
    return np.linalg.norm(x - y) / size if size else np.linalg.norm(x)


def assert_close(got, want, bound=1e-6):
    (losses, gradients), (want_losses, want_gradients) = got, want
    np.testing.assert_allclose(losses, want_losses, rtol=bound, atol=1e-9)
    errors = jax.tree.map(relative, gradients, want_gradients)
    assert max(jax.tree.leaves(errors)) <= bound, errors
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))
        for tree in (gradients, want_gradients)
    ]
    np.testing.assert_allclose(*norms, rtol=bound)
