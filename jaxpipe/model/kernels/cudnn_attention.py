"""cuDNN's fused attention: over all tokens, and over blocks that are merged elsewhere.

For a block of queries and keys the kernel returns the output and its log-sum-exp. Given the output
and log-sum-exp over all keys, the kernel's gradient is the block's contribution to the full
gradient (`jaxpipe.model.attention.blocks`). So blocks use cuDNN's two calls directly, and not jax's
function, whose gradient ignores the cotangent of the log-sum-exp.

The calls can be traced anywhere, and run on GPUs only. They take no mask. jax's function does, but
cannot be traced without a GPU: a plan traces the model within `replace_kernels`, where the calls
replace the function. They also do so for causal heads wider than 128, such as those of DeepSeek,
which the function refuses when it is compiled for GPUs that are not present.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxpipe.core.jax_internals import cudnn_attention
from jaxpipe.model.attention.blocks import AttentionOutput, BlockGradients, KeyBlock, QueryBlock
from jaxpipe.model.attention.case import cudnn_takes
from jaxpipe.model.kernels.cudnn import define_attention

_WIDEST = 128  # head that jax's function takes for every GPU
_STANDING_IN = ContextVar("is_replacing_kernels", default=False)


def fused_attention(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask_11LS: jax.Array | None,
    window: int = 0,
) -> jax.Array:
    """Attention where the mask is true; without a mask causal, in the window if it is not 0.

    jax counts a window as tokens to the left of a query, without the query itself.
    """
    operands, is_causal = (q_BLHK, k_BSGK, v_BSGK), mask_11LS is None
    if is_replacing_kernels() or (is_causal and q_BLHK.shape[-1] > _WIDEST):
        # jax's function hands a mask to the kernel as a bias.
        bias = () if is_causal else (jnp.where(mask_11LS, 0, -jnp.inf).astype(q_BLHK.dtype),)
        return _attend(is_causal, window, *operands, *bias)
    if not is_causal:
        return _of_library(*operands, mask=mask_11LS)
    left = (window - 1, 0) if window else None
    return _of_library(*operands, is_causal=True, local_window_size=left)


_of_library = partial(jax.nn.dot_product_attention, implementation="cudnn")


@contextmanager
def replace_kernels() -> Iterator[None]:
    """Replace kernels that cannot be traced without their device by stand-ins, in this context."""
    token = _STANDING_IN.set(True)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)


def is_replacing_kernels() -> bool:
    """Whether `replace_kernels` is active."""
    return _STANDING_IN.get()


@dataclass(frozen=True)
class FusedBlocks:
    """Blocks of `jaxpipe.model.attention.blocks` by cuDNN's kernel.

    There is no mask: every query attends to all keys before it, so no document can limit attention,
    and a window (0: none) only that of queries over their own tokens.
    """

    window: int = 0

    def attend_block(self, queries: QueryBlock, keys: KeyBlock, _: None = None) -> AttentionOutput:
        """Output of queries over a block of keys to all of which they attend."""
        return self._made(queries, keys, causal=False)

    def causal(self, queries: QueryBlock, keys: KeyBlock) -> AttentionOutput:
        """Output of queries over their own tokens."""
        return self._made(queries, keys, causal=True)

    def block_gradients(
        self, queries: QueryBlock, keys: KeyBlock, _: None = None
    ) -> BlockGradients:
        """Gradients of a block of keys to all of which the queries attend."""
        return self._gradients(queries, keys, causal=False)

    def causal_gradients(self, queries: QueryBlock, keys: KeyBlock) -> BlockGradients:
        """Gradients of attention over the queries' own tokens."""
        return self._gradients(queries, keys, causal=True)

    def _made(self, queries: QueryBlock, keys: KeyBlock, *, causal: bool) -> AttentionOutput:
        operands = queries.q_BLHK, keys.k_BSGK, keys.v_BSGK
        window = self.window if causal else 0
        mixed_BLHK, logsumexp_BHL = _FORWARD.bind(*operands, causal=causal, window=window)
        return AttentionOutput(mixed_BLHK.astype(logsumexp_BHL.dtype), logsumexp_BHL.swapaxes(1, 2))

    def _gradients(self, queries: QueryBlock, keys: KeyBlock, *, causal: bool) -> BlockGradients:
        (mixed_BLHK, logsumexp_BLH), dmixed_BLHK = queries.made, queries.dmixed_BLHK
        logsumexp_BHL = logsumexp_BLH.swapaxes(1, 2)
        operands = queries.q_BLHK, keys.k_BSGK, keys.v_BSGK, logsumexp_BHL, mixed_BLHK
        window = self.window if causal else 0
        gradients = _BACKWARD.bind(*operands, dmixed_BLHK, causal=causal, window=window)
        return BlockGradients(*(d.astype(logsumexp_BLH.dtype) for d in gradients))


def _lower_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int
) -> list[jax.Array]:
    primitive, how = _cudnn_primitive("fwd", q, causal, window)
    return primitive.bind(q, k, v, *_empty_operands(q), **how, is_training=True)


def _lower_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, *after: jax.Array, causal: bool, window: int
) -> list[jax.Array]:
    primitive, how = _cudnn_primitive("bwd", q, causal, window)
    return primitive.bind(q, k, v, *_empty_operands(q), *after, **how)


def _empty_operands(q: jax.Array) -> list[jax.Array]:
    """Empty bias, lengths, offsets and page tables, of queries and of keys."""
    return [jnp.zeros(0, q.dtype)] * 7


def _cudnn_primitive(
    name: str, q: jax.Array, causal: bool, window: int
) -> tuple[Primitive, dict[str, Any]]:
    """cuDNN's call for such queries; raises `ValueError` where it has no kernel for them."""
    if unmet := cudnn_takes(q.shape[-1], q.dtype.name):
        raise ValueError(unmet)
    return cudnn_attention(name, q.shape[-1], "CAUSAL" if causal else "NO_MASK", window)


_FORWARD, _BACKWARD = define_attention("fused", _lower_forward, _lower_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    causal: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array
) -> jax.Array:
    return _attend_forward(causal, window, q, k, v, *bias)[0]


def _attend_forward(
    causal: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array
) -> tuple[jax.Array, tuple]:
    mixed, logsumexp = _FORWARD.bind(q, k, v, *bias, causal=causal, window=window)
    return mixed, ((q, k, v, logsumexp, mixed), bias)


def _attend_backward(causal: bool, window: int, residuals: tuple, dmixed: jax.Array) -> tuple:
    operands, bias = residuals
    gradients = _BACKWARD.bind(*operands, dmixed, *bias, causal=causal, window=window)
    return *gradients, *(None for _ in bias)


_attend.defvjp(_attend_forward, _attend_backward)
