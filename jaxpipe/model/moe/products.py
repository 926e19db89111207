"""Products of groups of rows, each group with the matrix of its expert, as a device has them.

Shapes: S rows, E groups, of which the first rows are; I inputs and O outputs of a matrix. Rows
beyond the last group's make zeros.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.contract.layer import PRODUCT
from jaxpipe.model.fused import standing_in
from jaxpipe.model.moe.config import MixtureConfig

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # rows, matrices, sizes
_STEP = 128  # the kernel's tiles are so wide


class Grouped(NamedTuple):
    """How a device multiplies; `note` is a sentence for who starts a run, or nothing."""

    product: Product = lax.ragged_dot
    note: str = ""


def grouped_on(device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int) -> Grouped:
    """The kernel of tokamax where it can be had; else `ragged_dot`, and on GPUs a note why.

    On CPU and on NVIDIA GPUs that is one dense product, masked (jax 0.12): as if every row went to
    every group.
    """
    ragged = config.routed_experts and not config.capacity_factor
    if not ragged or device.platform not in ("gpu", "cuda"):
        return Grouped()
    missing = _missing(device, config, dtype, tp)
    if not missing:
        return Grouped(by_kernel, "grouped products of experts by tokamax's kernel")
    return Grouped(
        note=f"experts multiply every row of a device with every one of its experts, masked: "
        f"{missing}, or set model.capacity_factor"
    )


def by_kernel(rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """tokamax's kernel for Hopper GPUs: `[S, O]`.

    B and W have a kernel each. It leaves what it finds in rows that are of no group.
    """
    if standing_in():
        return lax.ragged_dot(rows_SI, matrices_EIO, sizes_E)
    return _by_kernel(rows_SI, matrices_EIO, sizes_E)


@jax.custom_vjp
def _by_kernel(rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from tokamax import ragged_dot

    made_SO = ragged_dot(rows_SI, matrices_EIO, sizes_E, implementation="mosaic")
    return checkpoint_name(_of_groups(made_SO, sizes_E), PRODUCT)


def _forward(rows_SI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> tuple[Any, Any]:
    given = rows_SI, matrices_EIO, sizes_E
    return _by_kernel(*given), given


def _backward(given: Any, dy_SO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    from tokamax import ragged_dot, ragged_dot_general

    rows_SI, matrices_EIO, sizes_E = given
    inputs_EOI = matrices_EIO.swapaxes(1, 2)
    drows_SI = ragged_dot(dy_SO, inputs_EOI, sizes_E, implementation="mosaic")
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    dmatrices_EIO = ragged_dot_general(rows_SI, dy_SO, sizes_E, numbers, implementation="mosaic")
    return _of_groups(drows_SI, sizes_E), dmatrices_EIO, None


_by_kernel.defvjp(_forward, _backward)


def _of_groups(made_SO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Zeros for what is of no group."""
    row_S = lax.iota(sizes_E.dtype, len(made_SO))
    return jnp.where((row_S < sizes_E.sum())[:, None], made_SO, 0)


def _missing(device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int) -> str:
    """Why the kernel cannot be had, and what to do; nothing if it can."""
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
