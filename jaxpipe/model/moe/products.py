"""Grouped products, of each group of rows with its expert's matrix, by the kind of device.

Shapes: S rows, sorted by group; E groups; I inputs and O outputs of a matrix. Rows beyond those of
the last group give zeros.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.contract.layer import PRODUCT
from jaxpipe.model.fused import is_replacing_kernels
from jaxpipe.model.moe.config import MixtureConfig

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # rows, matrices, group sizes
_STEP = 128  # width of the kernel's tiles
# Dimensions of each row times its group's matrix, and of each group's rows times other rows.
_EACH_ROW = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_EACH_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


class GroupedProduct(NamedTuple):
    """The grouped product of a device; `note` is a sentence to log when a run starts, or empty."""

    product: Product = lax.ragged_dot
    note: str = ""


def choose_grouped_product(
    device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int
) -> GroupedProduct:
    """Return tokamax's kernel where it is available, else `ragged_dot`, on GPUs with a note why.

    On CPU and on NVIDIA GPUs `ragged_dot` is one dense, masked product (jax 0.12), which costs as
    much as if every row went to every group.
    """
    ragged = config.routed_experts and not config.capacity_factor
    if not ragged or device.platform not in ("gpu", "cuda"):
        return GroupedProduct()
    missing = _missing_reason(device, config, dtype, tp)
    if not missing:
        return GroupedProduct(multiply_by_kernel, "grouped products of experts by tokamax's kernel")
    return GroupedProduct(
        note=f"experts multiply every row of a device with every one of its experts, masked: "
        f"{missing}, or set model.capacity_factor"
    )


def multiply_by_kernel(
    rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """Multiply with tokamax's kernel for Hopper GPUs: `[S, O]`.

    B and W have a kernel each. The kernel does not write rows that belong to no group.
    """
    if is_replacing_kernels():
        return lax.ragged_dot(rows_SI, matrices_EIO, sizes_E)
    return _multiply(rows_SI, matrices_EIO, sizes_E)


@jax.custom_vjp
def _multiply(rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    made_SO = _call_kernel(rows_SI, matrices_EIO, sizes_E, _EACH_ROW)
    return checkpoint_name(_zero_ungrouped(made_SO, sizes_E), PRODUCT)


def _forward(rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> tuple[Any, Any]:
    operands = rows_SI, matrices_EIO, sizes_E
    return _multiply(*operands), operands


def _backward(operands: Any, dy_SO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_SI, matrices_EIO, sizes_E = operands
    inputs_EOI = matrices_EIO.swapaxes(1, 2)
    drows_SI = _call_kernel(dy_SO, inputs_EOI, sizes_E, _EACH_ROW)
    dmatrices_EIO = _call_kernel(rows_SI, dy_SO, sizes_E, _EACH_GROUP)
    return _zero_ungrouped(drows_SI, sizes_E), dmatrices_EIO, None


_multiply.defvjp(_forward, _backward)


def _call_kernel(
    rows: jax.Array, other: jax.Array, sizes_E: jax.Array, numbers: lax.RaggedDotDimensionNumbers
) -> jax.Array:
    import tokamax

    # Tokamax warns of every call of a size that it has not tuned, in 4 kB each.
    with tokamax.config.ignore_autotuning_cache(True):
        return tokamax.ragged_dot_general(rows, other, sizes_E, numbers, implementation="mosaic")


def _zero_ungrouped(made_SO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Set rows that belong to no group to zero."""
    row_S = lax.iota(sizes_E.dtype, len(made_SO))
    return jnp.where((row_S < sizes_E.sum())[:, None], made_SO, 0)


def _missing_reason(device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int) -> str:
    """Reason why the kernel is not available, with the remedy; empty if it is."""
    widths = config.d_model, config.expert_width // tp
    if int(float(getattr(device, "compute_capability", 0))) != 9:
        return f"tokamax's kernels for both gradients are for Hopper GPUs, not {device.device_kind}"
    if find_spec("tokamax") is None:
        return "install tokamax (pip install 'jaxpipe[experts]')"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokamax's kernel is for bfloat16, not train.compute_dtype={dtype}: change it"
    if any(width % _STEP for width in widths):
        return (
            f"tokamax's kernel is for multiples of {_STEP}, not model.d_model={widths[0]} and "
            f"experts of {widths[1]} on a device: change them"
        )
    return ""
