"""The state of the scan on one rank."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxpipe.contract import Side
from jaxpipe.pipeline.rings import Rings

Tree = Any


class Carry(NamedTuple):
    """What a rank hands from tick to tick.

    `y`, `dx`: what this rank made last. `arriving`: with two-tick transfers, what the permutes of
    the last tick brought. `inbox` is a ring of messages; `rings` are those of each ring slot,
    which all chunks share; `for_head` and `for_embed` are rings of what the ends' deferred
    gradients take. The tables' slots point into them. `layer_gradients` are by chunk and
    layer slot. `losses`: each microbatch's share of the loss, `[M]`, or `[M, K]` of the head's K;
    `aux_losses`: its share of the losses that layers make, `[M]`, None where they make none;
    `side`: the sums and maxima of what layers make beside; `observed`: the maxima of what they
    leave at variables that they observe; `outputs`: what of every microbatch the
    model gives back, `[M, ...]`, where this rank has made it, else zeros. A forward-only pass has
    no `dx`, residuals, stash or gradients.
    """

    y: jax.Array
    dx: Any
    arriving: Any
    inbox: jax.Array
    rings: tuple[Rings, ...]
    for_head: Any
    for_embed: Any
    layer_gradients: tuple[tuple[Tree, ...], ...]
    shared_gradients: Tree
    losses: jax.Array
    aux_losses: jax.Array | None
    side: Side
    observed: Mapping[str, jax.Array]
    outputs: Tree
