"""Building blocks of layers, embeddings and heads: initial values, norms, products, look-ups.

Shapes: B examples, L tokens, D model, V entries of a table, K any last dim. Parameters may be
stored in any dtype; a layer computes in the dtype of its input, norms in float32 (or wider, if the
input is).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.core.contract.parameter import PP, TP, ParamSpec
from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.dropout import NO_MASKS, Masks

# (key, shape) -> float32 values of a vector, or of a stack of vectors
Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]
# (name, shape, standard deviation (0: zeros, None: ones) or a function, sharding) -> parameter
Init = Callable[[str, tuple[int, ...], float | Draw | None, ParamSpec], nnx.Param]


def init_from(key: jax.Array) -> Init:
    """Normal initial values that depend on the key and the parameter's name alone."""

    def init(
        name: str, shape: tuple[int, ...], std: float | Draw | None, _: ParamSpec
    ) -> nnx.Param:
        if std is None:
            return nnx.Param(jnp.ones(shape, jnp.float32))
        if std == 0:
            return nnx.Param(jnp.zeros(shape, jnp.float32))
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if callable(std):
            return nnx.Param(std(own, shape))
        return nnx.Param(std * jax.random.normal(own, shape, jnp.float32))

    return init


def within(init: Init, prefix: str) -> Init:
    """Initial values under names that begin with `prefix`."""
    return lambda name, *how: init(f"{prefix}/{name}", *how)


def broadcast_last(vector_K: jax.Array, x: jax.Array) -> jax.Array:
    """A vector in x's dtype, reshaped to broadcast along x's last dim."""
    return vector_K.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def scale(x: jax.Array, factor: float) -> jax.Array:
    """x times a factor, in x's dtype; the product is wider, as 16 bits would round the factor."""
    if factor == 1:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) over the last dim (Zhang and Sennrich 2019).

    The scale is stored without the `offset`, and both add up to 1 at the start. `devices` are those
    that share x's last dim in equal parts.
    """

    def __init__(
        self, name: str, size: int, eps: float, init: Init, leaf: ParamSpec, offset: float = 0.0,
        devices: OneDevice = ONE_DEVICE,
    ):  # fmt: skip
        self.scale = init(f"{name}/scale", (size,), 0.0 if offset else None, leaf)
        self.eps, self.offset, self.devices = eps, offset, devices

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x [..., size]`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        if self.devices.size > 1:
            square = self.devices.joint_sum(square) / self.devices.size
        normed = wide * jax.lax.rsqrt(square + self.eps)
        if self.offset:  # in 16 bits the sum would lose most of a small scale
            return (normed * (self.offset + broadcast_last(self.scale[...], wide))).astype(x.dtype)
        return normed.astype(x.dtype) * broadcast_last(self.scale[...], x)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias over the last dim (Ba et al. 2016)."""

    def __init__(self, name: str, size: int, eps: float, init: Init, leaf: ParamSpec):
        self.scale = init(f"{name}/scale", (size,), None, leaf)
        self.bias = init(f"{name}/bias", (size,), 0.0, leaf)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x [..., size]`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        off = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = off * jax.lax.rsqrt(jnp.mean(off * off, axis=-1, keepdims=True) + self.eps)
        scaled = normed.astype(x.dtype) * broadcast_last(self.scale[...], x)
        return scaled + broadcast_last(self.bias[...], x)


@dataclass(frozen=True)
class Dot:
    """Products of activations with weights, in the dtype of the activations."""

    @property
    def adds_up(self) -> bool:
        """Whether the gradients of several calls with the same weights may be added."""
        return True

    def __call__(self, x: jax.Array, **weights: jax.Array) -> tuple[jax.Array, ...]:
        """Multiply x with each weight, `[..., in] x [in, out] -> [..., out]`.

        Keywords are the weights' names in their layer. Products of E experts are
        `[E, ..., in] x [E, in, out] -> [E, ..., out]`.
        """
        return tuple(self.multiply(x, weight.astype(x.dtype)) for weight in weights.values())

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Multiply x with one weight of its dtype."""
        return x @ weight

    @property
    def row_multiple(self) -> int:
        """The number of rows of every group in `grouped` products must be a multiple of it."""
        return 1

    def grouped(self, product: Callable[..., jax.Array], sizes_E: jax.Array) -> "Dot":
        """The same products, of rows `[S, in]` with the matrices `[E, in, out]` of their groups.

        Args:
          product: multiplies rows, matrices and sizes in the rows' dtype.
          sizes_E: the number of each group's rows.
        """
        return GroupedDot(product, sizes_E)


@dataclass(frozen=True)
class GroupedDot(Dot):
    """Products of rows `[S, in]` with the matrices `[E, in, out]` of their groups."""

    product: Callable[..., jax.Array]
    sizes_E: jax.Array

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Multiply rows with one matrix per group."""
        return self.product(x, weight, self.sizes_E)


PLAIN_DOT = Dot()


class LayerInputs(NamedTuple):
    """The arguments of a layer call besides the stream, which may differ from call to call.

    Attributes:
      cache: keys and values of earlier slices; None without slices.
      masks: what is dropped in training.
      documents: the documents of packed rows; None: a row is one text.
      dot: multiplies with weights.
    """

    cache: Cache | None = None
    masks: Masks = NO_MASKS
    documents: RowDocuments | None = None
    dot: Dot = PLAIN_DOT


NO_INPUTS = LayerInputs()


class EmbedHeadParts(NamedTuple):
    """What embedding and head are built with: the `devices` that share their vocabulary.

    If these devices are of one pipeline rank, gradients are partial over pp: each stage adds those
    of the parameters it uses.
    """

    devices: OneDevice

    @property
    def _of_ranks(self) -> tuple[str, ...]:
        return () if PP in self.devices.axes else (PP,)

    def cut(self, dim: int) -> ParamSpec:
        """The spec of a parameter that is sharded over the devices along its vocabulary dim.

        A vocabulary that they do not divide is padded (`uneven`): no token looks the padding up,
        and the loss leaves its logits out.
        """
        cuts = tuple((axis, dim) for axis in self.devices.axes)
        return ParamSpec(sharded=cuts, partial_grad_axes=self._of_ranks, uneven=True)

    def own(self) -> ParamSpec:
        """The spec of a replicated parameter that each device applies to its tokens."""
        return ParamSpec(
            partial_grad_axes=(*self._of_ranks, TP) if self.devices.sequence else self._of_ranks
        )

    def of_first(self) -> ParamSpec:
        """The spec of a replicated parameter that only the first device uses."""
        return ParamSpec(partial_grad_axes=(PP, TP))

    def look_up(self, table_VD: jax.Array, ids_BL: jax.Array) -> jax.Array:
        """Entries of a table sharded along V, `[B, L, D]`; zeros for entries of other devices."""
        if self.devices.size == 1:
            return table_VD[ids_BL]
        own_BL, index_BL = local_entries(ids_BL, table_VD.shape[0], self.devices)
        return jnp.where(own_BL[..., None], table_VD[index_BL], 0)

    def by_first(self, x: jax.Array) -> jax.Array:
        """x on the first device and zeros on the others, as a summand of what `leave` sums."""
        return x if self.devices.size == 1 else jnp.where(self.devices.index() == 0, x, 0)


def local_entries(
    tokens_BL: jax.Array, own: int, devices: OneDevice
) -> tuple[jax.Array, jax.Array]:
    """Which tokens are in this device's `own` entries of the vocabulary, and where (else 0)."""
    local_BL = tokens_BL - devices.index() * own
    own_BL = (local_BL >= 0) & (local_BL < own)
    return own_BL, jnp.where(own_BL, local_BL, 0)
