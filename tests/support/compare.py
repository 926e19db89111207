"""How close two trees of results are. NaN is never close, and a failure names the worst leaf."""

import jax
import numpy as np

CAL_DIFF, FLOAT64, FLOAT32 = 1e-13, 1e-12, 1e-6


def cal_diff(x, y):
    """Return 1 - 2 x.y / (x.x + y.y), DeepSeek's measure of the difference of two tensors.

    It is about half the square of the relative error: 1e-13 is an error of 4.5e-7.
    """
    x, y = (np.asarray(leaf, np.float64).ravel() for leaf in (x, y))
    scale = x @ x + y @ y
    return 1 - 2 * (x @ y) / scale if scale else 0.0


def relative(x, y):
    """Return |x - y| / |y| of two arrays, or |x| where y is zero."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = np.linalg.norm(y)
    return np.linalg.norm(x - y) / size if size else np.linalg.norm(x)


def assert_within(measure, bound, got, want):
    """Check that leaves have the shapes of `want`'s and are within `bound` of them in `measure`."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, want)
    errors = {
        jax.tree_util.keystr(path): measure(leaf, other)
        for (path, leaf), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want))
    }
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    assert errors[worst] <= bound, (  # NaN <= bound is false
        f"{worst}: {measure.__name__} {errors[worst]:.3g} > {bound:.3g}"
    )


def assert_same(got, want, bound=FLOAT64):
    """Check that two float64 trees differ by rounding at most: both measures, leaf by leaf."""
    assert_within(cal_diff, CAL_DIFF, got, want)
    assert_within(relative, bound, got, want)


def assert_close(got, want, bound=FLOAT32):
    """Check that two `(losses, gradients)` agree up to float32 rounding: each leaf, and norms."""
    (losses, gradients), (want_losses, want_gradients) = got, want
    np.testing.assert_allclose(losses, want_losses, rtol=bound, atol=1e-9)
    assert_within(relative, bound, gradients, want_gradients)
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))
        for tree in (gradients, want_gradients)
    ]
    np.testing.assert_allclose(*norms, rtol=bound)
