"""Layer products in 8-bit floats: e4m3 in forward, e5m2 for gradients, one scale per tensor.

Micikevicius et al. 2022, "FP8 formats for deep learning". A product has three operands: x, the
weight w, and dy, the gradient of its output. Each is divided by its scale and rounded to 8 bits. F
computes x w, B dy w^T and W x^T dy, each from two 8-bit operands, and the result is multiplied by
both scales. Scales are powers of two, so that scaling itself rounds nothing, and a result depends
on a scale only through values outside the format's range. Values above it are clipped.

A scale is either known before the product (delayed scaling, from the largest absolute values of the
last `history` steps) or computed from the operand (current scaling).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract import Aux, Context
from jaxpipe.core.contract.devices import OneDevice
from jaxpipe.model.kernels.grouped_fp8 import TILE, GroupedFp8
from jaxpipe.model.layers.parts import Dot

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
      groups: multiplies rows with their groups' matrices; None: `grouped` products are not in 8
        bits.
      sizes_E: the number of each group's rows, in `grouped` products.
    """

    devices: OneDevice
    scales: Mapping[str, jax.Array] | None
    groups: GroupedFp8 | None = None
    sizes_E: jax.Array | None = None

    @property
    def adds_up(self) -> bool:
        """Return False: the cotangents of the scales are maxima, which may not be added."""
        return False

    @property
    def row_multiple(self) -> int:
        """Return the tile size of the 8-bit kernel, or 1 for products without groups."""
        return TILE if self.groups else 1

    def grouped(self, product: Callable[..., jax.Array], sizes_E: jax.Array) -> Dot:
        """Products in 8 bits if there are `groups`; x, all matrices and dy then have one scale."""
        return replace(self, sizes_E=sizes_E) if self.groups else super().grouped(product, sizes_E)

    def __call__(self, x: jax.Array, **weights: jax.Array) -> tuple[jax.Array, ...]:
        """Multiply as `Dot` does; x has the scale of the first weight.

        With current scaling every expert has scales of its own. With given scales, their "gradient"
        is the largest absolute value of each operand.
        """
        every = tuple(weight.astype(x.dtype) for weight in weights.values())
        scales = None if self.scales is None else tuple(self.scales[name] for name in weights)
        if self.sizes_E is None:
            how = _Batched(self.devices, every[0].ndim - 2)
        else:
            how = _Grouped(self.devices, self.groups)
        return _products(how, x, every, scales, self.sizes_E)


class _Operand(NamedTuple):
    """A tensor in 8 bits, its scale or those of E experts, and its largest value on this device."""

    values: jax.Array
    scale: jax.Array
    largest: jax.Array


def _round(place: int, x: jax.Array, scales: Any, devices: OneDevice, experts: int) -> _Operand:
    """Round operand number `place`: x, the weight or dy (0, 1, 2).

    The first `experts` dims are experts with scales of their own.
    """
    (form, _), dims = _OPERANDS[place], tuple(range(experts, x.ndim))
    largest = jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)
    scale = compute_scale(devices.largest(largest), form) if scales is None else scales[place]
    return _Operand(round_to_fp8(x, _append_dims(scale, x.ndim), form), scale, largest.max())


def _append_dims(scale: jax.Array, ndim: int) -> jax.Array:
    """A scale, or those of E experts, with dims of 1 appended up to `ndim`."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


# Hopper's fp8 products accumulate in fewer bits unless the highest precision is requested. Fewer
# bits are accurate enough for F only (flax and Transformer Engine have the same defaults).
_FORWARD, _BACKWARD = lax.Precision.DEFAULT, lax.Precision.HIGHEST


class _Batched(NamedTuple):
    """Products of x and weights whose first `experts` dims are those of a batch."""

    devices: OneDevice
    experts: int

    def outputs(self, x: _Operand, weight: _Operand, _: None, dtype: Any) -> jax.Array:
        """x w."""
        return self._product(x, weight, ((x.values.ndim - 1,), (self.experts,)), dtype, _FORWARD)

    def inputs(self, dy: _Operand, weight: _Operand, _: None, dtype: Any) -> jax.Array:
        """dy w^T."""
        sums = (dy.values.ndim - 1,), (self.experts + 1,)
        return self._product(dy, weight, sums, dtype, _BACKWARD)

    def weights(self, x: _Operand, dy: _Operand, _: None, dtype: Any) -> jax.Array:
        """x^T dy."""
        rows = tuple(range(self.experts, x.values.ndim - 1))
        return self._product(x, dy, (rows, rows), dtype, _BACKWARD)

    def _product(
        self, left: _Operand, right: _Operand, sums: Any, dtype: Any, precision: Any
    ) -> jax.Array:
        dims = sums, (tuple(range(self.experts)),) * 2
        product = lax.dot_general(
            left.values, right.values, dims, precision, preferred_element_type=dtype
        )
        return product * _append_dims((left.scale * right.scale).astype(dtype), product.ndim)


class _Grouped(NamedTuple):
    """Products of rows `[S, in]` and weights `[E, in, out]` of groups; none has a scale of its own.

    Operands are transposed after they are rounded to 8 bits, which moves the fewest bytes.
    """

    devices: OneDevice
    groups: GroupedFp8
    experts: int = 0

    def outputs(self, x: _Operand, weight: _Operand, sizes_E: Any, dtype: Any) -> jax.Array:
        """x w."""
        right = weight.values.swapaxes(1, 2)
        return self.groups.multiply(x.values, right, sizes_E, x.scale * weight.scale, dtype)

    def inputs(self, dy: _Operand, weight: _Operand, sizes_E: Any, dtype: Any) -> jax.Array:
        """dy w^T."""
        scale = dy.scale * weight.scale
        return self.groups.multiply(dy.values, weight.values, sizes_E, scale, dtype)

    def weights(self, x: _Operand, dy: _Operand, sizes_E: Any, dtype: Any) -> jax.Array:
        """x^T dy."""
        left, right = x.values.T, dy.values.T
        return self.groups.multiply(left, right, sizes_E, x.scale * dy.scale, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(how: _Batched | _Grouped, x: jax.Array, weights: Any, scales: Any, sizes: Any) -> Any:
    return _forward(how, x, weights, scales, sizes)[0]


def _forward(
    how: _Batched | _Grouped, x: jax.Array, weights: Any, scales: Any, sizes: Any
) -> tuple[Any, Any]:
    each = scales or (None,) * len(weights)
    left = _round(0, x, each[0], how.devices, how.experts)
    rights = [_round(1, *operand, how.devices, how.experts) for operand in zip(weights, each)]
    products = tuple(how.outputs(left, right, sizes, x.dtype) for right in rights)
    return products, (left, rights, scales, sizes)


def _backward(how: _Batched | _Grouped, residuals: Any, dys: Any) -> Any:
    x, weights, scales, sizes = residuals
    dtype, each = dys[0].dtype, scales or (None,) * len(weights)
    at_y = [_round(2, *operand, how.devices, how.experts) for operand in zip(dys, each)]
    dx = sum(how.inputs(dy, w, sizes, dtype) for dy, w in zip(at_y, weights))
    # Rounded last of all, so that a split layer can leave it out (`jaxpipe.core.split.jaxpr`).
    wide = jnp.promote_types(dtype, jnp.float32)
    dweights = tuple(how.weights(x, dy, sizes, wide).astype(dtype) for dy in at_y)
    if scales is not None:
        every = zip(weights, at_y)
        scales = tuple(jnp.stack([x.largest, w.largest, dy.largest]) for w, dy in every)
    return dx, dweights, scales, None


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

    def next_variables(self, variables: Tree, aux: Aux) -> Tree:
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

    Attributes:
      history: H; 0: current scaling.
      groups: multiplies rows with their groups' matrices; None: in the stream's dtype.
    """

    history: int = 0
    groups: GroupedFp8 | None = None

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

    def next_variables(self, variables: Tree, aux: Aux) -> Tree:
        """Scales for the largest values in the history; a scale without any stays as it is."""
        seen = aux.maxima["fp8_scale"]
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
            return Fp8Dot(devices, None, self.groups)
        scales = jnp.asarray(context.variables["fp8_scale"])[context.index]
        by_name = {name: scales[place] for place, name in enumerate(products)}
        return Fp8Dot(devices, by_name, self.groups)
