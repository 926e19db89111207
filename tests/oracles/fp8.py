"""Products in 8-bit floats by NumPy: e4m3 x e4m3 in F, e5m2 x e4m3 in B, e4m3 x e5m2 in W."""

import jax
import ml_dtypes
import numpy as np

E4, E5 = (ml_dtypes.float8_e4m3fn, 448.0, 8), (ml_dtypes.float8_e5m2, 57344.0, 15)


def power(x, form):
    """Return a scale by its definition: the largest value has the exponent below the format's."""
    return 2.0 ** (np.floor(np.log2(np.abs(x).max())) + 1 - form[2])


def eight(x, scale, form):
    """Return x after division by the scale, rounding to 8 bits and multiplication."""
    dtype, largest, _ = form
    return np.clip(x / scale, -largest, largest).astype(dtype).astype(x.dtype) * scale


def emulated(x, weights, dys, scales):
    """Return the products, dx and weight gradients, with all sums in x's own dtype."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    x, weights, dys = jax.tree.map(lambda a: a.astype(wide), (x, weights, dys))
    scales = scales or [(power(x, E4), power(w, E4), power(dy, E5)) for w, dy in zip(weights, dys)]
    x_8 = eight(x, scales[0][0], E4)
    ws = [eight(w, scale, E4) for w, (_, scale, _) in zip(weights, scales)]
    gs = [eight(dy, scale, E5) for dy, (_, _, scale) in zip(dys, scales)]
    dx = sum(g @ w.T for g, w in zip(gs, ws))
    return [x_8 @ w for w in ws], dx, [np.einsum("bli,blo->io", x_8, g) for g in gs]
