"""cuDNN's fused-attention calls, which jax has only in its private module `jax._src.cudnn`.

This module uses the two primitives that become cuDNN's calls: they can be bound on any platform,
and run on GPUs only. jax's public function needs a GPU when it is traced, and supports neither
documents nor a gradient of the log-sum-exp that it can return.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.extend.core import Primitive

Mask = Literal["NO_MASK", "CAUSAL", "PADDING_CAUSAL"]

_ATTENTION, _GRADIENT = "dot_product_attention_", "_gradient"
_TILE = 128  # queries, and keys, per tile of the kernel


def create_primitive(name: str) -> Primitive:
    """Create a primitive with several results.

    Its name begins like those of jax's attention primitives, because rematerialisation policies
    match them by this prefix.
    """
    made = Primitive(_ATTENTION + name)
    made.multiple_results = True
    return made


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
    products = 5 if name.endswith(_GRADIENT) else 2
    return products * 2 * examples * heads * scores * width


def _unmasked_scores(tokens: int, window: int) -> int:
    """Scores of causal attention in the tiles in which any score is unmasked."""
    total = 0
    for begin in range(0, tokens, _TILE):
        end = min(begin + _TILE, tokens)
        first = max(begin - window + 1, 0) // _TILE * _TILE if window else 0
        total += (end - begin) * (end - first)
    return total


def call(
    name: Literal["fwd", "bwd"], width: int, mask: Mask, window: int
) -> tuple[Primitive, dict[str, Any]]:
    """Return jax's primitive for one of cuDNN's calls with heads of this width, and its parameters.

    Its operands are `[B, L, H, K]`. The parameters are private to jax; jax 0.12 has two more.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    how: dict[str, Any] = {
        "scale": width**-0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType[mask],
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
    }
    if jax.__version_info__ >= (0, 12):
        how |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return getattr(cudnn, f"_dot_product_attention_{name}_p"), how
