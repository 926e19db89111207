"""Attention by cuDNN's kernel: in one call, by its packed form for documents, or block by block."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.model.attention.case import AttentionCase, cudnn_supports
from jaxpipe.model.attention.kernel import Queries, attend_in_blocks
from jaxpipe.model.attention.keys import Keys, Make
from jaxpipe.model.attention.plain import attention_mask
from jaxpipe.model.kernels.cudnn_attention import FusedBlocks, fused_attention
from jaxpipe.model.kernels.cudnn_packed import packed_attention, shard_documents


@dataclass(frozen=True)
class CudnnKernel:
    """`model.attention="cudnn"`."""

    supports = staticmethod(cudnn_supports)

    def attend(self, case: AttentionCase, queries: Queries, keys: Keys) -> jax.Array:
        """Attention output of the queries, `[B, L, H, K]`; see `Kernel`."""
        width = keys.value_width
        if width < queries.q_BLHK.shape[-1]:
            keys = keys._replace(make=_with_wide_values(keys.make))
        if case.documents:
            mixed_BLHK = _attend_packed(case, queries, keys)
        elif _has_blocks(case, queries, keys):
            mixed_BLHK = attend_in_blocks(case, queries, keys, FusedBlocks(case.window))
        else:
            mixed_BLHK = _attend_at_once(case, queries, keys)
        return mixed_BLHK[..., :width]


def _attend_packed(case: AttentionCase, queries: Queries, keys: Keys) -> jax.Array:
    """Attention within the documents of packed rows."""
    parts, length = keys.opened().parts, queries.q_BLHK.shape[1]
    first = jnp.asarray(queries.begin + case.sequence.start(length), jnp.int32)
    documents = shard_documents(queries.documents, first, case.documents)
    return packed_attention(queries.q_BLHK, *parts, *documents, first, case.window, keys.sink_H)


def _has_blocks(case: AttentionCase, queries: Queries, keys: Keys) -> bool:
    """Whether attention runs block by block, where no block needs a mask.

    Keys of a ring do, and slices whose tokens are all on this device, without a window. Without
    slices all keys are one block, whose output sinks can follow.
    """
    if case.sequence.ring > 1:
        return True
    is_local = keys.tokens == queries.q_BLHK.shape[1]
    return is_local and (not case.window if case.slices else case.has_sinks)


def _attend_at_once(case: AttentionCase, queries: Queries, keys: Keys) -> jax.Array:
    """Causal attention over keys of this device, or by a mask over gathered and earlier ones."""
    k_BSGK, v_BSGK = keys.opened().parts
    mask_B1LS = None
    if case.gathers or case.slices:
        place_L, token_S = queries.place_L(case.sequence), jnp.arange(k_BSGK.shape[1])
        mask_B1LS = attention_mask(place_L, token_S, case.window, None)
    return fused_attention(queries.q_BLHK, k_BSGK, v_BSGK, mask_B1LS, case.window)


def _with_wide_values(make: Make | None) -> Make:
    """Keys, and values padded to their width.

    jax's function takes only values as wide as keys, its primitives others with cuDNN 9.10 or
    later.
    """

    def wide(*parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        k_BSGK, v_BSGK = parts if make is None else make(*parts)
        more = k_BSGK.shape[-1] - v_BSGK.shape[-1]
        return k_BSGK, jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, more)])

    return wide
