"""Moments that stay in host memory between updates (`train.offload_moments`)."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxpipe.parallel import map_stage_stacked
from jaxpipe.pipeline import buffers

Tree = Any


def kept_on_host(shardings: Tree) -> Tree:
    """Shardings of an optimizer state with its moments in host memory."""
    return _of_moments(lambda sharding: sharding.with_memory_kind(buffers.HOST), shardings)


def fetched(moments: Tree, after: jax.Array) -> tuple[Tree, jax.Array]:
    """Copy the moments to the device once `after` is computed; return them and `after`.

    Without the barrier XLA may start the copy before the step, and the moments would then use
    device memory throughout the step. The caller must read the returned `after`: XLA removes an
    operand of a barrier whose result is not used.
    """
    moments, after = lax.optimization_barrier((moments, after))
    return _of_moments(buffers.to_device, moments), after


def returned(moments: Tree) -> Tree:
    """Copy the moments to host memory.

    `out_shardings` alone are not enough: XLA then leaves the moments on the device.
    """
    return _of_moments(buffers.to_host, moments)


def _of_moments(change: Callable[[Any], Any], state: Tree) -> Tree:
    """Apply `change` to every leaf of the stage-stacked trees in `state`, not to counts.

    >>> state = {"mu": {"embed_head": 1, "layers": (2,)}, "count": 3}
    >>> _of_moments(lambda leaf: -leaf, state)
    {'count': 3, 'mu': {'embed_head': -1, 'layers': (-2,)}}
    """
    return map_stage_stacked(lambda node: jax.tree.map(change, node), state)
