"""Grouped products by a GPU kernel: the same numbers, the same split, and when it is available."""

import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernels import TOKAMAX
from mixtures import MODELS

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.kernels.cudnn_attention import replace_kernels
from jaxpipe.model.layers.moe import products
from jaxpipe.model.layers.moe.products import choose_grouped_product, multiply_by_kernel

SIZES = {"d_model": 256, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8,
         "n_layers": 1}  # fmt: skip
MODEL = LlamaConfig(**SIZES, n_experts=4, d_expert=256)
HOPPER = SimpleNamespace(
    platform="gpu", compute_capability="9.0", device_kind="H100", core_count=132
)
BLACKWELL = SimpleNamespace(platform="gpu", compute_capability="10.0", device_kind="B200")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 0, 0), (9, 0, 0)])
def test_the_kernel_makes_what_ragged_dot_makes(sizes, monkeypatch):
    """Its rows of no group are zeros too, in gradients as well."""
    monkeypatch.setitem(sys.modules, "tokamax", TOKAMAX)
    with jax.enable_x64(True):
        rows = jax.random.normal(jax.random.key(0), (9, 4), jnp.float64)
        matrices = jax.random.normal(jax.random.key(1), (3, 4, 5), jnp.float64)
        dy = jax.random.normal(jax.random.key(2), (9, 5), jnp.float64)
        sizes = jnp.array(sizes)

        def made(product):
            y, pull = jax.vjp(lambda *given: product(*given, sizes), rows, matrices)
            return y, *pull(dy)

        jax.tree.map(np.testing.assert_array_equal, made(multiply_by_kernel), made(lax.ragged_dot))


def test_a_plan_needs_no_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)  # makes its import fail
    rows, sizes = jnp.ones((2, 4)), jnp.array([2])
    with replace_kernels():
        np.testing.assert_array_equal(multiply_by_kernel(rows, jnp.ones((1, 4, 3)), sizes), 4)


@pytest.mark.parametrize(
    ("device", "model", "dtype", "found", "note"),
    [
        (CPU, MODEL, "float32", None, ""),
        (HOPPER, MODELS["narrow"], "bfloat16", None, ""),  # a capacity: products are batched
        (HOPPER, LlamaConfig(**SIZES), "bfloat16", None, ""),
        (HOPPER, MODEL, "bfloat16", None, r"pip install -e '.\[experts\]'"),
        (HOPPER, MODEL, "float32", "tokamax", "16-bit floats, not .*=float32"),
        (HOPPER, MODELS["qwen"], "bfloat16", "tokamax", "not model.d_model=16 and experts of 6"),
        (BLACKWELL, MODEL, "bfloat16", "tokamax", "for Hopper GPUs, not B200"),
        (HOPPER, MODEL, "bfloat16", "tokamax", "by tokamax's kernel"),
    ],
)
def test_who_has_the_kernel(device, model, dtype, found, note, monkeypatch):
    """Without the kernel, the note tells its cost and the remedy."""
    monkeypatch.setitem(sys.modules, "tokamax", found and TOKAMAX)
    got = choose_grouped_product(device, model, jnp.dtype(dtype), tp=2)
    assert (got.product is multiply_by_kernel) == note.startswith("by tokamax")
    if not note:
        assert not got.note
    else:
        assert re.search(note, got.note)


@pytest.mark.parametrize(
    ("device", "model", "found", "cores", "note"),
    [
        (CPU, MODEL, None, 0, "^$"),
        (None, MODEL, None, 0, "^$"),  # a plan's
        (CPU, MODELS["qwen"], None, None, "^$"),
        (HOPPER, MODELS["narrow"], None, None, "^$"),
        (HOPPER, MODEL, "tokamax", 132, "^grouped products of experts in 8 bits by a kernel$"),
        (HOPPER, MODEL, None, 132, "by a kernel; those of adapters: experts multiply every row"),
        (HOPPER, MODELS["qwen"], "tokamax", None, "not in 8 bits: .* not model.d_model=16 and"),
        (BLACKWELL, MODEL, "tokamax", None, "not in 8 bits: the kernel is for Hopper GPUs, not B2"),
    ],
)
def test_who_multiplies_groups_in_8_bits(device, model, found, cores, note, monkeypatch):
    """By a kernel, by the reference implementation, or not, which a GPU's note says."""
    monkeypatch.setitem(sys.modules, "tokamax", found and TOKAMAX)
    monkeypatch.setattr(products, "_JAX_OF_FP8", (0, 10, 1))
    got = choose_grouped_product(device, model, jnp.dtype("bfloat16"), tp=2, fp8=True)
    assert (got.in_fp8 and got.in_fp8.cores) == cores
    assert re.search(note, got.note)
    without = choose_grouped_product(device, model, jnp.dtype("bfloat16"), tp=2)
    assert without.in_fp8 is None
    assert without.product is got.product


def test_an_old_jax_has_no_kernel_for_8_bits(monkeypatch):
    monkeypatch.setattr(products, "_JAX_OF_FP8", (99, 1))
    got = choose_grouped_product(HOPPER, MODEL, jnp.dtype("bfloat16"), tp=2, fp8=True)
    assert got.in_fp8 is None
    assert "the kernel needs jax 99.1 or later, not" in got.note
