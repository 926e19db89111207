"""The carry of the scan over ticks, on one device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxpipe.core.contract import Aux, Tree
from jaxpipe.core.executor.ring_buffers import RingArrays


class Carry(NamedTuple):
    """What a tick hands on to the next; a forward-only pass has no dx, stash or gradients.

    Attributes:
      y, dx: the last outputs of F and of B or BW on this pipeline rank.
      arriving: with two-tick transfers, the messages received in the last tick.
      inbox: ring buffer of received messages.
      rings: ring buffers of every ring group, shared by all chunks.
      head_ring, embed_ring: ring buffers of the inputs of deferred head and embedding gradients.
      layer_gradients: gradient sums, by chunk and run of layers.
      embed_head_gradients: gradient sums of embedding and head.
      read_gradients: those of layers that read embedding and head, where the vocabulary is sharded
        over pp; None: no layer reads them, or layers add to `embed_head_gradients`.
      losses: each microbatch's share of the loss, `[M]`, or `[M, K]` for K losses of the head.
      aux_losses: its share of the layers' auxiliary losses, `[M]`; None: they have none.
      aux: sums, maxima and per-example values of the layers.
      statistics: maxima of the cotangents of statistics variables, by name.
      outputs: model outputs, `[M, ...]`; zeros where another rank computes them.
    """

    y: jax.Array
    dx: Any
    arriving: Any
    inbox: jax.Array
    rings: tuple[RingArrays, ...]
    head_ring: Any
    embed_ring: Any
    layer_gradients: tuple[tuple[Tree, ...], ...]
    embed_head_gradients: Tree
    read_gradients: Tree
    losses: jax.Array
    aux_losses: jax.Array | None
    aux: Aux
    statistics: Mapping[str, jax.Array]
    outputs: Tree
