"""cuDNN's calls of fused attention, as jax has them in a private module alone, `jax._src.cudnn`.

Of it are used the two primitives that become cuDNN's calls: they can be bound anywhere, and only
GPUs run them. jax's public function wants a GPU when it is traced, and has neither documents nor
a gradient of the log of the sum that it can give.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.extend.core import Primitive

Mask = Literal["NO_MASK", "CAUSAL", "PADDING_CAUSAL"]

_ATTENTION, _GRADIENT = "dot_product_attention_", "_gradient"
_TILE = 128  # queries, and keys, that the kernel takes at once


def primitive(name: str) -> Primitive:
    """A new one with several results.

    Policies of rematerialisation know attention's by the beginning of their name, as jax's.
    """
    made = Primitive(_ATTENTION + name)
    made.multiple_results = True
    return made


def flops(name: str, shapes: tuple[tuple[int, ...], ...], how: Mapping[str, Any]) -> int | None:
    """FLOPs of the primitive of that name, asked for so, on operands of such shapes; None: of none.

    Counted are the scores of tiles of which some are seen: the kernel leaves out the others, and
    what it is given to mask it makes. Of documents, whose borders a plan does not know, that is as
    if a row were one. Forwards there are two products of the scores' size; backwards five, for the
    scores are made once more (Dao et al. 2022, Algorithm 4).

    >>> flops("dot_product_attention_fused", ((1, 512, 1, 1), (1, 512, 1, 1)), {"causal": True})
    655360
    """
    if not name.startswith(_ATTENTION):
        return None
    (examples, queries, heads, width), (_, keys, _, _) = shapes[:2]
    causal, window = how.get("causal", queries == keys), how.get("window", 0)
    scores = _seen(queries, window) if causal else queries * keys
    products = 5 if name.endswith(_GRADIENT) else 2
    return products * 2 * examples * heads * scores * width


def _seen(tokens: int, window: int) -> int:
    """Scores of causal attention in the tiles that hold any that are seen."""
    total = 0
    for begin in range(0, tokens, _TILE):
        end = min(begin + _TILE, tokens)
        first = max(begin - window + 1, 0) // _TILE * _TILE if window else 0
        total += (end - begin) * (end - first)
    return total


def call(
    name: Literal["fwd", "bwd"], width: int, mask: Mask, window: int
) -> tuple[Primitive, dict[str, Any]]:
    """jax's primitive of one of cuDNN's calls on heads of such a width, and how it is asked for.

    Its operands are `[B, L, H, K]`. Its arguments are private, and jax 0.12 has two more of them.
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
