"""Fused attention of cuDNN, and a stand-in for it that is traced anywhere and runs nowhere.

What a model costs is planned on machines without a GPU, where jax refuses to trace cuDNN's kernel.
Within `stand_ins` an equation with its operands, results and FLOPs stands for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jaxpipe.model.packed import BACKWARD, FORWARD

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
        return _stand_in(q_BLHK, k_BSGK, v_BSGK)
    if mask_11LS is not None:
        return _of_cudnn(q_BLHK, k_BSGK, v_BSGK, mask=mask_11LS)
    left = (window - 1, 0) if window else None
    return _of_cudnn(q_BLHK, k_BSGK, v_BSGK, is_causal=True, local_window_size=left)


_of_cudnn = partial(jax.nn.dot_product_attention, implementation="cudnn")


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


def flops_of_kernel(name: str, *shapes: tuple[int, ...]) -> int | None:
    """FLOPs of the kernel of that name for operands of such shapes; None: there is none.

    All scores are counted as made, those that a mask, a window or the borders of documents leave
    out too, and once more for the gradients (Dao et al. 2022, Algorithm 4): two products forwards,
    five backwards.
    """
    forwards, backwards = name in (_FORWARD.name, FORWARD), name in (_BACKWARD.name, BACKWARD)
    products = 2 * forwards + 5 * backwards
    if not products:
        return None
    (examples, queries, heads, width), (_, keys, _, _) = shapes[:2]
    return products * 2 * examples * heads * queries * keys * width


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


# Policies of rematerialisation know the kernel by the beginning of its name.
_FORWARD = _primitive("dot_product_attention_stand_in")
_BACKWARD = _primitive("dot_product_attention_gradient_stand_in")


@_FORWARD.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray) -> list[ShapedArray]:
    """What is mixed, and the log of the sum of exponentials of every query, `[B, H, L]`."""
    examples, queries, heads, _ = q.shape
    logsumexp = ShapedArray((examples, heads, queries), jnp.dtype(jnp.float32))
    return [ShapedArray(q.shape, q.dtype), logsumexp]


@_BACKWARD.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray, *_: ShapedArray) -> list[ShapedArray]:
    """Gradients at q, k and v."""
    return [ShapedArray(a.shape, a.dtype) for a in (q, k, v)]


@jax.custom_vjp
def _stand_in(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _FORWARD.bind(q, k, v)[0]


def _stand_in_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    mixed, logsumexp = _FORWARD.bind(q, k, v)
    return mixed, (q, k, v, logsumexp, mixed)


def _stand_in_backward(kept: tuple, dmixed: jax.Array) -> tuple:
    return tuple(_BACKWARD.bind(*kept, dmixed))


_stand_in.defvjp(_stand_in_forward, _stand_in_backward)
