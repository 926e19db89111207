"""The primitives that become cuDNN's fused-attention calls, and their FLOPs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxpipe.core.jax_internals import define_primitive

# Rematerialisation policies match jax's attention primitives by this prefix.
_ATTENTION = "dot_product_attention_"
_GRADIENT = "_gradient"
_TILE = 128  # queries, and keys, per tile of the kernel


def define_attention(
    name: str, lower_forward: Callable, lower_gradient: Callable
) -> tuple[Primitive, Primitive]:
    """Create the primitives of an attention and of its gradient.

    The operands of both begin with q `[B, L, H, K]`, k and v `[B, S, G, K]`. The first returns the
    output, `[B, L, H, K]`, and the log-sum-exp of every query, `[B, H, L]` in float32 or wider; the
    second the gradients of q, k and v. The arguments lower them (`define_primitive`).
    """

    def outputs(q: Any, *_: Any, **__: Any) -> list[Any]:
        examples, queries, heads, _ = q.shape
        wide = jnp.promote_types(q.dtype, jnp.float32)
        return [q, jax.ShapeDtypeStruct((examples, heads, queries), wide)]

    def gradients(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> list[Any]:
        return [q, k, v]

    name = _ATTENTION + name
    forward = define_primitive(name, outputs, lower_forward)
    return forward, define_primitive(name + _GRADIENT, gradients, lower_gradient)


def flops(name: str, shapes: tuple[tuple[int, ...], ...], how: Mapping[str, Any]) -> int | None:
    """FLOPs of the primitive `name` with parameters `how`, by operand shapes; None: not attention.

    Counted are all scores of the tiles in which any score is unmasked: the kernel skips the other
    tiles, and computes the masked scores inside a tile. A packed row counts as one document,
    because a plan does not know where its documents end. The forward pass has two products of the
    scores' size; the backward pass has five, because it recomputes the scores (Dao et al. 2022,
    Algorithm 4).

    >>> flops("dot_product_attention_fused", ((1, 512, 1, 1), (1, 512, 1, 1)), {"causal": True})
    655360
    """
    if not name.startswith(_ATTENTION):
        return None
    (examples, queries, heads, width), (_, keys, _, _) = shapes[:2]
    causal, window = how.get("causal", queries == keys), how.get("window", 0)
    scores = _unmasked_scores(queries, window) if causal else queries * keys
    products = 5 if is_gradient(name) else 2
    return products * 2 * examples * heads * scores * width


def is_gradient(name: str) -> bool:
    """Whether the primitive `name` is the gradient of an attention."""
    return name.endswith(_GRADIENT)


def workspace(name: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Bytes that a primitive's kernel takes beside operands and results, by operand shapes.

    For packed rows the gradient takes as much as float32 gradients of q, and 16-bit ones of the
    keys and values of every query head, for each of a row's documents and as long as the row.
    Measured once: 7.99 GiB for these shapes, by cuDNN 9.19 on an H200.

    >>> shapes = (1, 4096, 32, 128), (1, 4096, 8, 128), (1, 4096, 8, 128), (1, 64)
    >>> workspace("dot_product_attention_packed_gradient", shapes) / 2**30
    8.0
    """
    if name != f"{_ATTENTION}packed{_GRADIENT}":
        return 0
    (*_, heads, width), (_, tokens, _, _), _, (examples, documents) = shapes[:4]
    return examples * documents * tokens * heads * width * (4 + 2 + 2)


def _unmasked_scores(tokens: int, window: int) -> int:
    """Scores of causal attention in the tiles in which any score is unmasked."""
    total = 0
    for begin in range(0, tokens, _TILE):
        end = min(begin + _TILE, tokens)
        first = max(begin - window + 1, 0) // _TILE * _TILE if window else 0
        total += (end - begin) * (end - first)
    return total
