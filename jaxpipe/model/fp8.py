"""Layer products in 8-bit floats: e4m3 in forward, e5m2 for gradients, one scale per tensor.

Micikevicius et al. 2022, "FP8 formats for deep learning". A product has three operands: x, the
weight w, and dy, the gradient of its output. Each is divided by its scale and rounded to 8 bits. F
computes x w, B dy w^T and W x^T dy, each from two 8-bit operands, and the result is multiplied by
both scales. Scales are powers of two, so that scaling itself rounds nothing, and a result depends
on a scale only through values outside the format's range. Values above it are clipped.

A scale is either known before the product (delayed scaling, from the largest absolute values of the
last `history` steps) or computed from the operand (current scaling).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.contract import Aux, Context
from jaxpipe.model.parts import Dot
from jaxpipe.partition.devices import OneDevice

Tree = Any
_LEAST = 2.0**-100  # smaller absolute values count as zero


class Format(NamedTuple):
    """An 8-bit float; `largest` is at least 2^`exponent` and less than 2^(`exponent` + 1)."""

    dtype: Any
    largest: float
    exponent: int


E4M3 = Format(jnp.float8_e4m3fn, 448.0, 8)
E5M2 = Format(jnp.float8_e5m2, 57344.0, 15)
# The format of x, weight and dy, and a guess of its largest absolute value before the first step, a
# power of two. The range is wide: normal numbers then reach down to 8e-3, 1e-4 and 6e-11.
_OPERANDS = ((E4M3, 64.0), (E4M3, 1.0), (E5M2, 2.0**-6))


def compute_scale(largest: jax.Array, form: Format) -> jax.Array:
    """The divisor for absolute values up to `largest`: a power of two, in float32.

    It leaves headroom for values that grow, a factor of 1.75 to 3.5 of the format's range. It is 1
    for zeros, and not finite where the values are not.

    >>> [float(compute_scale(jnp.float32(x), E4M3)) for x in (0.0, 1.0, 255.0, 256.0)]
    [1.0, 0.0078125, 1.0, 2.0]
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.uint32)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    return jnp.where(power < _LEAST, 1.0, power * 2.0 ** (1 - form.exponent))


def round_to_fp8(x: jax.Array, scale: jax.Array, form: Format) -> jax.Array:
    """x divided by its scale, clipped and rounded to 8-bit floats."""
    scaled = x * (1 / scale).astype(x.dtype)
    return jnp.clip(scaled, -form.largest, form.largest).astype(form.dtype)


@dataclass(frozen=True)
class Fp8Dot(Dot):
    """Products of activations with weights by 8-bit operands, in the activations' dtype.

    Attributes:
      devices: the devices that share the layer.
      scales: by product name the scales `[3]` of x, weight and dy. None: each scale is computed
        from the operand's largest absolute value over all devices.
    """

    devices: OneDevice
    scales: Mapping[str, jax.Array] | None

    @property
    def adds_up(self) -> bool:
        """No: the gradients of scales are maxima."""
        return False

    def __call__(self, x: jax.Array, **weights: jax.Array) -> tuple[jax.Array, ...]:
        """Multiply as `Dot` does; x has the scale of the first weight.

        With current scaling every expert has scales of its own. With given scales, their "gradient"
        is the largest absolute value of each operand.
        """
        every = tuple(weight.astype(x.dtype) for weight in weights.values())
        scales = None if self.scales is None else tuple(self.scales[name] for name in weights)
        return _products(_Rounding(self.devices, every[0].ndim - 2), x, every, scales)


class _Operand(NamedTuple):
    """A tensor in 8 bits, its scale or those of E experts, and its largest value on this device."""

    values: jax.Array
    scale: jax.Array
    largest: jax.Array


class _Rounding(NamedTuple):
    """How operands become 8-bit floats, and are multiplied; the first `experts` dims are E."""

    devices: OneDevice
    experts: int

    def of(self, place: int, x: jax.Array, scales: Any) -> _Operand:
        """Round operand number `place`: x, the weight or dy (0, 1, 2)."""
        (form, _), dims = _OPERANDS[place], tuple(range(self.experts, x.ndim))
        largest = jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)
        scale = (
            compute_scale(self.devices.largest(largest), form) if scales is None else scales[place]
        )
        return _Operand(round_to_fp8(x, _append_dims(scale, x.ndim), form), scale, largest.max())

    def product(
        self, left: _Operand, right: _Operand, sums: Any, dtype: Any, precision: Any
    ) -> jax.Array:
        """The product of two operands, contracted over the dims `sums` of both."""
        dims = sums, (tuple(range(self.experts)),) * 2
        product = lax.dot_general(
            left.values, right.values, dims, precision, preferred_element_type=dtype
        )
        return product * _append_dims((left.scale * right.scale).astype(dtype), product.ndim)


def _append_dims(scale: jax.Array, ndim: int) -> jax.Array:
    """A scale, or those of E experts, with dims of 1 appended up to `ndim`."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


# Hopper's fp8 products accumulate in fewer bits unless the highest precision is requested. Fewer
# bits are accurate enough for F only (flax and Transformer Engine have the same defaults).
_FORWARD, _BACKWARD = lax.Precision.DEFAULT, lax.Precision.HIGHEST


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(rounding: _Rounding, x: jax.Array, weights: Any, scales: Any) -> Any:
    return _forward(rounding, x, weights, scales)[0]


def _forward(rounding: _Rounding, x: jax.Array, weights: Any, scales: Any) -> Any:
    each = scales or (None,) * len(weights)
    left, sums = rounding.of(0, x, each[0]), ((x.ndim - 1,), (rounding.experts,))
    rights = [rounding.of(1, *operand) for operand in zip(weights, each)]
    products = tuple(rounding.product(left, right, sums, x.dtype, _FORWARD) for right in rights)
    return products, (left, rights, scales)


def _backward(rounding: _Rounding, residuals: Any, dys: Any) -> Any:
    x, weights, scales = residuals
    first, last, dtype = rounding.experts, dys[0].ndim - 1, dys[0].dtype
    rows, each = tuple(range(first, last)), scales or (None,) * len(weights)
    at_y = [rounding.of(2, *operand) for operand in zip(dys, each)]

    def product(left: _Operand, right: _Operand, *sums: Any, wide: Any = dtype) -> jax.Array:
        return rounding.product(left, right, sums, wide, _BACKWARD)

    dx = sum(product(dy, w, (last,), (first + 1,)) for dy, w in zip(at_y, weights))
    # Rounded last of all, so that a split layer can leave it out (`jaxpipe.pipeline.jaxpr`).
    wide = jnp.promote_types(dtype, jnp.float32)
    dweights = tuple(product(x, dy, rows, rows, wide=wide).astype(dtype) for dy in at_y)
    if scales is not None:
        every = zip(weights, at_y)
        scales = tuple(jnp.stack([x.largest, w.largest, dy.largest]) for w, dy in every)
    return dx, dweights, scales


_products.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Precision:
    """The precision of products with layers' weights: here the dtype of the stream."""

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the statistics variables (`LayerKind.statistics`)."""
        return ()

    def variables(self, layers: int, products: int) -> dict[str, Any]:
        """Initial variables of a model with that many layers, and products per layer."""
        return {}

    def next_variables(self, variables: Tree, side: Aux) -> Tree:
        """The variables after a step."""
        return {}

    def dot(self, products: tuple[str, ...], devices: OneDevice, context: Context) -> Dot:
        """The `Dot` of a layer that has these products, and that `devices` share."""
        return Dot()


PLAIN = Precision()


@dataclass(frozen=True)
class Fp8(Precision):
    """fp8 products; scales follow from the last `history` steps, or with 0 from each operand.

    With a history the variables are, for N layers with P products of three operands, the scales and
    the largest absolute values of the last H steps, the most recent first.
    """

    history: int = 0

    @property
    def observed(self) -> tuple[str, ...]:
        """The scales, whose cotangent carries the largest absolute values."""
        return ("fp8_scale",) if self.history else ()

    def variables(self, layers: int, products: int) -> dict[str, Any]:
        """Scales `[N, P, 3]` for the expected values, and an empty history `[N, P, 3, H]`."""
        if not self.history:
            return {}
        expected = [largest * 2.0 ** (1 - form.exponent) for form, largest in _OPERANDS]
        scales = np.broadcast_to(np.array(expected, np.float32), (layers, products, 3))
        history = np.zeros((*scales.shape, self.history), np.float32)
        return {"fp8_scale": scales.copy(), "fp8_history": history}

    def next_variables(self, variables: Tree, side: Aux) -> Tree:
        """Scales for the largest values in the history; a scale without any stays as it is."""
        seen = side.maxima["fp8_scale"]
        seen = jnp.where(jnp.isfinite(seen), seen, 0)[..., None]
        history = jnp.concatenate([seen, variables["fp8_history"][..., :-1]], axis=-1)
        largest = history.max(-1)
        updates = [
            compute_scale(largest[..., place], form) for place, (form, _) in enumerate(_OPERANDS)
        ]
        scales = jnp.where(largest > 0, jnp.stack(updates, -1), variables["fp8_scale"])
        return {"fp8_scale": scales, "fp8_history": history}

    def dot(self, products: tuple[str, ...], devices: OneDevice, context: Context) -> Dot:
        """A `Dot` with the scales of this layer, if there is a history."""
        if not self.history:
            return Fp8Dot(devices, None)
        scales = jnp.asarray(context.variables["fp8_scale"])[context.index]
        return Fp8Dot(devices, {name: scales[place] for place, name in enumerate(products)})
