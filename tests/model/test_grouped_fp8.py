"""Grouped products in 8-bit floats: the kernel in jax's interpreter, and experts that use them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from flax import nnx

from jaxpipe.core.contract import Context
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.kernels.grouped_fp8 import TILE, GroupedFp8, multiply_ref
from jaxpipe.model.layers.fp8 import E4M3, E5M2, Fp8, round_to_fp8
from jaxpipe.model.layers.moe.experts import PRODUCTS, DroplessDispatch, Experts
from jaxpipe.model.layers.parts import Dot, init_from
from jaxpipe.model.options import UNSHARED

ROWS = 5 * TILE  # of which the groups have 4 tiles
SIZES = 3 * TILE, 0, TILE


@pytest.mark.slow(unless=["inputs", "weights"])
@pytest.mark.parametrize(
    ("shapes", "forms", "dtype"),
    [
        (((ROWS, 256), (3, TILE, 256)), (E4M3, E4M3), "bfloat16"),
        (((ROWS, TILE), (3, 256, TILE)), (E5M2, E4M3), "bfloat16"),
        (((256, ROWS), (TILE, ROWS)), (E4M3, E5M2), "float32"),
    ],
    ids=["outputs", "inputs", "weights"],
)
def test_the_kernel_makes_what_the_reference_does(shapes, forms, dtype):
    """In the interpreter, with an empty group and rows of none; sums of integers are exact."""
    interpreter = pytest.importorskip(
        "jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU"
    )
    if not hasattr(interpreter, "InterpretGPUParams"):
        pytest.skip("this jax has no interpreter of Mosaic GPU")
    from jaxpipe.model.kernels import hopper

    rng, sizes, scale = np.random.default_rng(0), jnp.int32(SIZES), jnp.float32(0.5)
    left, right = (
        jnp.asarray(rng.integers(-8, 9, shape), form.dtype) for shape, form in zip(shapes, forms)
    )
    kernel = hopper.multiply_rows if right.ndim == 3 else hopper.multiply_groups
    how = {"cores": 3, "interpret": interpreter.InterpretGPUParams(detect_races=True)}
    got = kernel(left, right, sizes, scale, dtype=jnp.dtype(dtype), **how)
    want = multiply_ref(left, right, sizes, scale, jnp.dtype(dtype))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(want, "float32"))
    assert np.abs(np.asarray(want, "float32")).max() > 0


def test_dropless_experts_are_a_loop_over_experts():
    """Values and all gradients, with one expert that no token chose, and padding."""
    config = LlamaConfig(
        n_layers=1, d_model=TILE, n_heads=1, n_kv_heads=1, d_ff=8, vocab_size=8, n_experts=4,
        experts_per_token=2, d_expert=TILE,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    scales = 2.0 ** np.array([[-6, -9, -9], [-6, -10, -8], [-5, -9, -7]])
    choice = rng.permuted(np.tile([0, 1, 3], (2, 5, 1)), axis=-1)[..., :2]
    choice[1, 3:] = config.n_experts
    with jax.enable_x64(True):
        module = Experts(config, UNSHARED, init_from(jax.random.key(0)))
        graph, matrices = nnx.split(module)
        matrices = jax.tree.map(lambda leaf: 50.0 * leaf.astype("float64"), matrices)
        x, dy = rng.normal(size=(2, 2, 5, TILE))
        weights = rng.uniform(size=(2, 5, 2))
        variables = {"fp8_scale": jnp.asarray(scales, "float32")[None]}

        def dispatched(x, weights, matrices, variables):
            context = Context({}, jnp.int32(0), None, variables)
            dot = Fp8(2, GroupedFp8()).dot(PRODUCTS, ONE_DEVICE, context)
            dispatch = DroplessDispatch(config.n_experts, ALL_EXPERTS, None)
            return dispatch(x, weights, jnp.asarray(choice), nnx.merge(graph, matrices), dot)[0]

        def looped(x, weights, matrices):
            """Every expert multiplies every token, with a weight of 0 where it is not chosen."""
            y, given = 0, dict(zip(PRODUCTS, scales))
            for expert in range(config.n_experts):
                own = jax.tree.map(lambda leaf, expert=expert: leaf[expert], matrices)
                shares = jnp.sum(jnp.where(choice == expert, weights, 0), -1, keepdims=True)
                y += nnx.merge(graph, own)(x, shares, Looped(given), None)
            return y

        operands = jax.tree.map(jnp.asarray, (x, weights, matrices))
        got, pull = jax.vjp(jax.jit(dispatched), *operands, variables)
        *gradients, seen = pull(jnp.asarray(dy))
        want, pull = jax.vjp(jax.jit(looped), *operands)
        assert_same((got, gradients), (want, list(pull(jnp.asarray(dy)))), 1e-12)
        assert not np.asarray(gradients[2]["w_up"][...])[2].any()
    real = np.abs(x[choice[..., 0] < config.n_experts]).max()
    np.testing.assert_allclose(seen["fp8_scale"][0, :2, 0], real, 1e-6)
    largest = [np.abs(matrices[name][...]).max() for name in ("w_gate", "w_up", "w_down")]
    np.testing.assert_allclose(seen["fp8_scale"][0, :, 1], largest, 1e-6)


class Looped(Dot):
    """Products of one expert, each operand rounded by the scale that all experts have."""

    def __init__(self, scales):
        self.scales = scales

    def __call__(self, x, **weights):
        every = ((self.scales[name], weight) for name, weight in weights.items())
        return tuple(rounded_product(tuple(scales), x, weight) for scales, weight in every)


def rounded(x, scale, form):
    return round_to_fp8(x, jnp.float32(scale), form).astype(x.dtype) * scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_product(scales, x, weight):
    return rounded(x, scales[0], E4M3) @ rounded(weight, scales[1], E4M3)


def forward(scales, x, weight):
    return rounded_product(scales, x, weight), (x, weight)


def backward(scales, operands, dy):
    x, weight, dy = (
        rounded(*each) for each in zip((*operands, dy), scales, (E4M3, E4M3, E5M2), strict=True)
    )
    return dy @ weight.T, jnp.einsum("bli,blo->io", x, dy)


rounded_product.defvjp(forward, backward)
