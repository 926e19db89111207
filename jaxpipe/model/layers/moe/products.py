"""Grouped products, of each group of rows with its expert's matrix, by the kind of device.

Shapes: S rows, sorted by group; E groups; I inputs and O outputs of a matrix. Rows beyond those of
the last group give zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract.layer import PRODUCT
from jaxpipe.model.kernels.cudnn_attention import is_replacing_kernels
from jaxpipe.model.kernels.grouped_fp8 import TILE, GroupedFp8
from jaxpipe.model.layers.moe.config import MixtureConfig

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # rows, matrices, group sizes
_STEP = 128  # width of tokamax's tiles
_JAX_OF_FP8 = 0, 11, 2  # the first jax with which the kernel for 8 bits was compiled
# Dimensions of each row times its group's matrix, and of each group's rows times other rows.
_EACH_ROW = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_EACH_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


class GroupedProduct(NamedTuple):
    """The grouped products of a device.

    Attributes:
      product: in the rows' dtype.
      in_fp8: in 8 bits; None: not in 8 bits.
      note: a sentence to log when a run starts, or empty.
    """

    product: Product = lax.ragged_dot
    in_fp8: GroupedFp8 | None = None
    note: str = ""


def choose_grouped_product(
    device: Any | None, config: MixtureConfig, dtype: jnp.dtype, tp: int, *, fp8: bool = False
) -> GroupedProduct:
    """Return kernels where they are available, else `ragged_dot`, on GPUs with a note why.

    On CPU and on NVIDIA GPUs `ragged_dot` is one dense, masked product (jax 0.12), which costs as
    much as if every row went to every group. With `fp8` products are in 8 bits where a GPU can
    make them so, and on CPU if sizes are those that it could.

    Without a device products are the reference implementations, as a plan traces them.
    """
    ragged = config.routed_experts and not config.capacity_factor
    on_gpu = device is not None and device.platform in ("gpu", "cuda")
    if not ragged:
        return GroupedProduct()
    missing = _missing_in_fp8(device if on_gpu else None, config, tp)
    in_fp8 = GroupedFp8(device.core_count if on_gpu else 0) if fp8 and not missing else None
    if not on_gpu:
        return GroupedProduct(in_fp8=in_fp8)
    chosen = _choose_for_gpu(device, config, dtype, tp)
    note = chosen.note
    if in_fp8:
        others = "" if chosen.product is multiply_by_kernel else f"; those of adapters: {note}"
        note = f"grouped products of experts in 8 bits by a kernel{others}"
    elif fp8:
        note += f"; not in 8 bits: {missing}"
    return chosen._replace(in_fp8=in_fp8, note=note)


def _choose_for_gpu(
    device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int
) -> GroupedProduct:
    """The products in the rows' dtype."""
    missing = _missing_reason(device, config, dtype, tp)
    if not missing:
        note = "grouped products of experts by tokamax's kernel"
        return GroupedProduct(multiply_by_kernel, note=note)
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


def _missing_in_fp8(device: Any | None, config: MixtureConfig, tp: int) -> str:
    """Reason why products are not in 8 bits, with the remedy; empty if they are."""
    widths = _widths(config, tp)
    if any(width % TILE for width in widths):
        return (
            f"its products have multiples of {TILE}, not model.d_model={widths[0]} and experts of "
            f"{widths[1]} on a device: change them"
        )
    if device is None:
        return ""
    if not _is_hopper(device):
        return f"the kernel is for Hopper GPUs, not {device.device_kind}"
    if jax.__version_info__ < _JAX_OF_FP8:
        needed = ".".join(map(str, _JAX_OF_FP8))
        return f"the kernel needs jax {needed} or later, not {jax.__version__}"
    return ""


def _is_hopper(device: Any) -> bool:
    return int(float(getattr(device, "compute_capability", 0))) == 9


def _widths(config: MixtureConfig, tp: int) -> tuple[int, int]:
    return config.d_model, config.expert_width // tp


def _missing_reason(device: Any, config: MixtureConfig, dtype: jnp.dtype, tp: int) -> str:
    """Reason why tokamax's kernel is not available, with the remedy; empty if it is."""
    widths = _widths(config, tp)
    if not _is_hopper(device):
        return f"tokamax's kernels for both gradients are for Hopper GPUs, not {device.device_kind}"
    try:
        import tokamax  # noqa: F401
    except ImportError as error:  # of a package that tokamax needs, too
        return f"install tokamax (pip install -e '.[experts]'): {error}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokamax's kernel is for 16-bit floats, not train.compute_dtype={dtype}: change it"
    if any(width % _STEP for width in widths):
        return (
            f"tokamax's kernel is for multiples of {_STEP}, not model.d_model={widths[0]} and "
            f"experts of {widths[1]} on a device: change them"
        )
    return ""
