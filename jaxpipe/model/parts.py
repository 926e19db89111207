"""What layers of every family are built of: initial values, norm, product, and how devices share.

Shapes: B examples, L tokens. Parameters may be stored in any dtype; a layer computes in the dtype
of its input, norms in float32 (or wider, if the input is).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.model.attention import Attend
from jaxpipe.partition.devices import OneDevice
from jaxpipe.partition.leaf import TP, Leaf

# (name, shape, standard deviation or None for ones, how devices share it)
Init = Callable[[str, tuple[int, ...], float | None, Leaf], nnx.Param]


def init_from(key: jax.Array) -> Init:
    """Normal initial values that depend on the key and the parameter's name alone."""

    def init(name: str, shape: tuple[int, ...], std: float | None, _: Leaf) -> nnx.Param:
        if std is None:
            return nnx.Param(jnp.ones(shape, jnp.float32))
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return nnx.Param(std * jax.random.normal(own, shape, jnp.float32))

    return init


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim (Zhang and Sennrich 2019)."""

    def __init__(self, name: str, size: int, eps: float, init: Init, leaf: Leaf):
        self.scale = init(f"{name}/scale", (size,), None, leaf)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x [..., size]`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


@dataclass(frozen=True)
class Dot:
    """The product of activations with a weight, in the dtype of the activations."""

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`[..., in] x [in, out] -> [..., out]`."""
        return x @ weight.astype(x.dtype)


class Parts(NamedTuple):
    """What a layer is built of besides its own maths: what may be chosen without editing it.

    `devices` share the layer, `attend` mixes tokens, `dot` multiplies with weights.
    """

    devices: OneDevice
    attend: Attend
    dot: Dot = Dot()

    def cut(self, dim: int) -> Leaf:
        """Of a parameter of which each of the devices has an equal part along a dim."""
        return Leaf(cuts=((TP, dim),))

    def own(self, *, differs: bool) -> Leaf:
        """Of a parameter that each has whole; if its use `differs`, gradients must be added up."""
        return Leaf(summed=(TP,) if differs else ())


def own_entries(tokens_BL: jax.Array, own: int, devices: OneDevice) -> tuple[jax.Array, jax.Array]:
    """Which tokens are in this device's `own` entries of the vocabulary, and where (else 0)."""
    local_BL = tokens_BL - devices.index() * own
    own_BL = (local_BL >= 0) & (local_BL < own)
    return own_BL, jnp.where(own_BL, local_BL, 0)
