"""Products of layers in 8-bit floats: e4m3 in forward, e5m2 for gradients, one scale a tensor.

Micikevicius et al. 2022, "FP8 formats for deep learning". A product has three operands: x, the
weight, and dy, the gradient at what it makes. Each is divided by its scale and rounded to 8 bits,
F makes x w, B dy w^T, W x^T dy, each of two 8-bit operands, and what they make is multiplied with
both scales. Scales are powers of two, so dividing and multiplying by them rounds nothing, and a
result depends on a scale only through what falls out of the range. What is larger than an 8-bit
float can be is made the largest.

A scale is known before the product (`history`: delayed scaling, from the largest absolute values of
so many last steps), or is made from the operand (current scaling).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.contract import Context, Side
from jaxpipe.model.parts import Dot
from jaxpipe.partition.devices import OneDevice

Tree = Any
_LEAST = 2.0**-100  # absolute values below are taken for zero


class Format(NamedTuple):
    """An 8-bit float; `largest` is at least 2^`exponent` and less than 2^(`exponent` + 1)."""

    dtype: Any
    largest: float
    exponent: int


E4M3 = Format(jnp.float8_e4m3fn, 448.0, 8)
E5M2 = Format(jnp.float8_e5m2, 57344.0, 15)
# Of x, weight and dy: their format, and before a step is seen what the largest is expected to be, a
# power of two. The range is wide: normal numbers then reach down to 8e-3, 1e-4 and 6e-11.
_OPERANDS = ((E4M3, 64.0), (E4M3, 1.0), (E5M2, 2.0**-6))


def scale_of(largest: jax.Array, form: Format) -> jax.Array:
    """What to divide by where absolute values are up to `largest`: a power of two, in float32.

    Of the format's range a factor of 1.75 to 3.5 is left, for values that grow. 1 of zeros; not
    finite where the values are not.

    >>> [float(scale_of(jnp.float32(x), E4M3)) for x in (0.0, 1.0, 255.0, 256.0)]
    [1.0, 0.0078125, 1.0, 2.0]
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.uint32)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    return jnp.where(power < _LEAST, 1.0, power * 2.0 ** (1 - form.exponent))


def rounded(x: jax.Array, scale: jax.Array, form: Format) -> jax.Array:
    """x divided by its scale, as 8-bit floats."""
    scaled = x * (1 / scale).astype(x.dtype)
    return jnp.clip(scaled, -form.largest, form.largest).astype(form.dtype)


@dataclass(frozen=True)
class Fp8Dot(Dot):
    """Products of activations with weights by 8-bit operands, in the activations' dtype.

    `scales` has those of x, weight and dy of each product, `[3]`, by its name. None: they are made
    from the operands, from what is largest on all `devices` that share the layer.
    """

    devices: OneDevice
    scales: Mapping[str, jax.Array] | None

    def __call__(self, x: jax.Array, **weights: jax.Array) -> tuple[jax.Array, ...]:
        """As `Dot` says; x has the scale of the first weight.

        Of experts' products each has scales of its own where they are made from the operands. What
        the gradient leaves at given scales is the largest absolute value of each operand.
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
        """x, the weight or dy (0, 1, 2)."""
        (form, _), dims = _OPERANDS[place], tuple(range(self.experts, x.ndim))
        largest = jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)
        scale = scale_of(self.devices.largest(largest), form) if scales is None else scales[place]
        return _Operand(rounded(x, _with_dims(scale, x.ndim), form), scale, largest.max())

    def product(
        self, left: _Operand, right: _Operand, sums: Any, dtype: Any, precision: Any
    ) -> jax.Array:
        """The product, summed over these dims of both."""
        dims = sums, (tuple(range(self.experts)),) * 2
        made = lax.dot_general(
            left.values, right.values, dims, precision, preferred_element_type=dtype
        )
        return made * _with_dims((left.scale * right.scale).astype(dtype), made.ndim)


def _with_dims(scale: jax.Array, ndim: int) -> jax.Array:
    """A scale, or those of E experts, with further dims of 1."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


# On Hopper products add up with fewer bits unless the highest precision is asked for, which is
# accurate enough for F alone (flax's and Transformer Engine's defaults).
_FORWARD, _BACKWARD = lax.Precision.DEFAULT, lax.Precision.HIGHEST


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(rounding: _Rounding, x: jax.Array, weights: Any, scales: Any) -> Any:
    return _forward(rounding, x, weights, scales)[0]


def _forward(rounding: _Rounding, x: jax.Array, weights: Any, scales: Any) -> Any:
    each = scales or (None,) * len(weights)
    left, sums = rounding.of(0, x, each[0]), ((x.ndim - 1,), (rounding.experts,))
    rights = [rounding.of(1, *given) for given in zip(weights, each)]
    made = tuple(rounding.product(left, right, sums, x.dtype, _FORWARD) for right in rights)
    return made, (left, rights, scales)


def _backward(rounding: _Rounding, kept: Any, dys: Any) -> Any:
    x, weights, scales = kept
    first, last, dtype = rounding.experts, dys[0].ndim - 1, dys[0].dtype
    rows, each = tuple(range(first, last)), scales or (None,) * len(weights)
    at_y = [rounding.of(2, *given) for given in zip(dys, each)]

    def product(left: _Operand, right: _Operand, *sums: Any) -> jax.Array:
        return rounding.product(left, right, sums, dtype, _BACKWARD)

    dx = sum(product(dy, w, (last,), (first + 1,)) for dy, w in zip(at_y, weights))
    dweights = tuple(product(x, dy, rows, rows) for dy in at_y)
    if scales is not None:
        every = zip(weights, at_y)
        scales = tuple(jnp.stack([x.largest, w.largest, dy.largest]) for w, dy in every)
    return dx, dweights, scales


_products.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Precision:
    """How layers multiply with their weights: in the dtype of the stream."""

    @property
    def observed(self) -> tuple[str, ...]:
        """Variables at which a layer's gradient leaves what it has seen (`LayerKind.observed`)."""
        return ()

    def variables(self, layers: int, products: int) -> dict[str, Any]:
        """First values of the state of a model of so many layers, of so many products each."""
        return {}

    def next_variables(self, variables: Tree, side: Side) -> Tree:
        """The state after a step."""
        return {}

    def dot(self, products: tuple[str, ...], devices: OneDevice, context: Context) -> Dot:
        """What multiplies in a layer of these products, which the devices share."""
        return Dot()


PLAIN = Precision()


@dataclass(frozen=True)
class Fp8(Precision):
    """In 8-bit floats; scales come from so many last steps, or with 0 from each operand alone.

    Over the history N layers have for each of P products three scales, and the largest absolute
    values of H steps, those of the last step first.
    """

    history: int = 0

    @property
    def observed(self) -> tuple[str, ...]:
        """The scales, at which the largest absolute values are left."""
        return ("fp8_scale",) if self.history else ()

    def variables(self, layers: int, products: int) -> dict[str, Any]:
        """Scales `[N, P, 3]` of what is expected, and an empty history `[N, P, 3, H]`."""
        if not self.history:
            return {}
        expected = [largest * 2.0 ** (1 - form.exponent) for form, largest in _OPERANDS]
        scales = np.broadcast_to(np.array(expected, np.float32), (layers, products, 3))
        history = np.zeros((*scales.shape, self.history), np.float32)
        return {"fp8_scale": scales.copy(), "fp8_history": history}

    def next_variables(self, variables: Tree, side: Side) -> Tree:
        """Scales of the largest of the history; where nothing was seen they stay."""
        seen = side.maxima["fp8_scale"]
        seen = jnp.where(jnp.isfinite(seen), seen, 0)[..., None]
        history = jnp.concatenate([seen, variables["fp8_history"][..., :-1]], axis=-1)
        largest = history.max(-1)
        made = [scale_of(largest[..., place], form) for place, (form, _) in enumerate(_OPERANDS)]
        scales = jnp.where(largest > 0, jnp.stack(made, -1), variables["fp8_scale"])
        return {"fp8_scale": scales, "fp8_history": history}

    def dot(self, products: tuple[str, ...], devices: OneDevice, context: Context) -> Dot:
        """With the scales of this layer, if they are known."""
        if not self.history:
            return Fp8Dot(devices, None)
        scales = jnp.asarray(context.variables["fp8_scale"])[context.index]
        return Fp8Dot(devices, {name: scales[place] for place, name in enumerate(products)})
