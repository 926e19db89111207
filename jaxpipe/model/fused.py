"""Fused attention of cuDNN: of all tokens, and of blocks that are put together elsewhere.

Of a block of queries and keys the kernel gives what is mixed and the log of the sum behind it; its
gradient, given those of all keys, is the block's part of the whole one (`jaxpipe.model.blocks`). So
blocks are made by its two calls directly, and not by jax's function, whose gradient leaves out that
at the log of the sum.

The calls can be traced anywhere, and run on GPUs alone. jax's function cannot be traced without a
GPU: what a model costs is planned within `stand_ins`, where the calls stand for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxpipe.model import cudnn
from jaxpipe.model.blocks import Gradients, Keys, Made, Queries
from jaxpipe.model.decoder_config import unmet_by_kernel

_STANDING_IN = ContextVar("standing_in", default=False)


def fused_attention(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask_11LS: jax.Array | None,
    window: int = 0,
) -> jax.Array:
    """Attention where the mask is true; without one to all tokens before, or the window's last.

    The library counts how many tokens are seen to the left of a query, which is not one of them.
    """
    if standing_in():
        return _stand_in(mask_11LS is None, window, q_BLHK, k_BSGK, v_BSGK)
    if mask_11LS is not None:
        return _of_library(q_BLHK, k_BSGK, v_BSGK, mask=mask_11LS)
    left = (window - 1, 0) if window else None
    return _of_library(q_BLHK, k_BSGK, v_BSGK, is_causal=True, local_window_size=left)


_of_library = partial(jax.nn.dot_product_attention, implementation="cudnn")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Traces within it have stand-ins in place of kernels that need their device."""
    token = _STANDING_IN.set(True)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)


def standing_in() -> bool:
    """Whether this is within `stand_ins`."""
    return _STANDING_IN.get()


@dataclass(frozen=True)
class FusedBlocks:
    """Blocks of `jaxpipe.model.blocks` by the kernel, of which every query sees all keys before it.

    There is no mask: neither windows nor documents may end a query's sight.
    """

    def attended(self, queries: Queries, keys: Keys, _: None = None) -> Made:
        """What queries mix of a block that they see all of."""
        return self._made(queries, keys, causal=False)

    def causal(self, queries: Queries, keys: Keys) -> Made:
        """What queries mix of their own tokens."""
        return self._made(queries, keys, causal=True)

    def gradients(self, queries: Queries, keys: Keys, _: None = None) -> Gradients:
        """What a block that they see all of adds to the gradients."""
        return self._gradients(queries, keys, causal=False)

    def causal_gradients(self, queries: Queries, keys: Keys) -> Gradients:
        """What their own tokens add to the gradients."""
        return self._gradients(queries, keys, causal=True)

    def _made(self, queries: Queries, keys: Keys, *, causal: bool) -> Made:
        given = queries.q_BLHK, keys.k_BSGK, keys.v_BSGK
        mixed_BLHK, logsumexp_BHL = _FORWARD.bind(*given, causal=causal, window=0)
        return Made(mixed_BLHK.astype(logsumexp_BHL.dtype), logsumexp_BHL.swapaxes(1, 2))

    def _gradients(self, queries: Queries, keys: Keys, *, causal: bool) -> Gradients:
        (mixed_BLHK, logsumexp_BLH), dmixed_BLHK = queries.made, queries.dmixed_BLHK
        given = queries.q_BLHK, keys.k_BSGK, keys.v_BSGK, logsumexp_BLH.swapaxes(1, 2), mixed_BLHK
        found = _BACKWARD.bind(*given, dmixed_BLHK, causal=causal, window=0)
        return Gradients(*(d.astype(logsumexp_BLH.dtype) for d in found))


_FORWARD, _BACKWARD = cudnn.primitive("fused"), cudnn.primitive("fused_gradient")


@_FORWARD.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray, **_: Any) -> list[ShapedArray]:
    """What is mixed, and the log of the sum of exponentials of every query, `[B, H, L]`."""
    examples, queries, heads, _ = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return [ShapedArray(q.shape, q.dtype), ShapedArray((examples, heads, queries), wide)]


@_BACKWARD.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray, *_: Any, **__: Any) -> list[ShapedArray]:
    """Gradients at q, k and v."""
    return [ShapedArray(a.shape, a.dtype) for a in (q, k, v)]


def _lower_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int
) -> list[jax.Array]:
    primitive, how = _of_cudnn("fwd", q, causal, window)
    return primitive.bind(q, k, v, *_unused(q), **how, is_training=True)


def _lower_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, *after: jax.Array, causal: bool, window: int
) -> list[jax.Array]:
    primitive, how = _of_cudnn("bwd", q, causal, window)
    return primitive.bind(q, k, v, *_unused(q), *after, **how)


def _unused(q: jax.Array) -> list[jax.Array]:
    """A bias, lengths, offsets and page tables, of queries and of keys: there are none."""
    return [jnp.zeros(0, q.dtype)] * 7


def _of_cudnn(
    name: str, q: jax.Array, causal: bool, window: int
) -> tuple[Primitive, dict[str, Any]]:
    """The call on such queries; raises `ValueError` where cuDNN has no kernel for them."""
    for sentence in unmet_by_kernel(q.shape[-1], q.dtype.name):
        raise ValueError(sentence)
    return cudnn.call(name, q.shape[-1], "CAUSAL" if causal else "NO_MASK", window)


for _kernel, _lower in ((_FORWARD, _lower_forward), (_BACKWARD, _lower_backward)):
    mlir.register_lowering(_kernel, mlir.lower_fun(_lower, multiple_results=True))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stand_in(causal: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _stand_in_forward(causal, window, q, k, v)[0]


def _stand_in_forward(
    causal: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, tuple]:
    mixed, logsumexp = _FORWARD.bind(q, k, v, causal=causal, window=window)
    return mixed, (q, k, v, logsumexp, mixed)


def _stand_in_backward(causal: bool, window: int, kept: tuple, dmixed: jax.Array) -> tuple:
    return tuple(_BACKWARD.bind(*kept, dmixed, causal=causal, window=window))


_stand_in.defvjp(_stand_in_forward, _stand_in_backward)
